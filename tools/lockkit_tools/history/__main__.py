"""
``python -m lockkit_tools.history FILE --model=fenced-mutex``: check a history for linearizability, lock by lock.

Exit status: 0 if every lock's history is valid, 1 if one is invalid, 2 if one is unknown, or the file is no history.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockkit_tools.history.checker import CONFIGURATIONS_MAX, SECONDS_MAX, Verdict, check
from lockkit_tools.history.models import MODELS, limited
from lockkit_tools.history.reading import MalformedHistory, read

SHOWN = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what the command line says, and give the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lockkit_tools.history", description=__doc__)
    parser.add_argument("file", type=Path, help="history in Jepsen's format: EDN or JSON")
    parser.add_argument("--model", choices=MODELS, required=True, help="what the lock may do; locks with a limit in"
                        " the history are semaphores in any case")  # fmt: skip
    parser.add_argument("--limit", type=int, help="permits of the semaphore, or holds of a reentrant lock's holder")
    parser.add_argument("--lock", help="only this one")
    parser.add_argument("--seconds", type=float, default=SECONDS_MAX, help="for each lock (default: %(default)g)")
    parser.add_argument("--configurations", type=int, default=CONFIGURATIONS_MAX, help="for each lock")
    given = parser.parse_args(arguments)
    try:
        locks = read(given.file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, MalformedHistory) as error:
        parser.error(f"{given.file}: {error}")
    if given.lock is not None:
        locks = {name: history for name, history in locks.items() if name == given.lock}
    if not locks:
        parser.error(f"{given.file}: no operations{'' if given.lock is None else f' of {given.lock!r}'}")
    words = set()
    for name, history in sorted(locks.items()):
        semaphore = any(operation.limit is not None for operation in history)
        model = limited("semaphore" if semaphore else given.model, given.limit)
        verdict = check(history, model, configurations_max=given.configurations, seconds_max=given.seconds)
        words.add(verdict.word)
        title = f"{name}: " if name else ""
        sys.stdout.write(f"{title}{verdict.word}, {len(history)} calls\n")
        sys.stdout.writelines(f"  {line}\n" for line in explain(verdict))
    return 1 if "invalid" in words else 2 if "unknown" in words else 0


def explain(verdict: Verdict) -> Iterator[str]:
    """Say why a history is not valid, line by line."""
    if verdict.reason:
        yield verdict.reason
    if verdict.failed is not None:
        yield f"not linearizable up to operation {verdict.failed.returned}: nothing explains"
        yield f"  {verdict.failed}"
        for title, found in (("under way", verdict.concurrent), ("possible before", verdict.states)):
            yield from (f"{title}: {one}" for one in found[:SHOWN])
            if len(found) > SHOWN:
                yield f"{title}: {len(found) - SHOWN} more"


if __name__ == "__main__":
    sys.exit(main())
