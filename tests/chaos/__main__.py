"""``python -m tests.chaos [TARGET …] [--seconds=120] [--seed=N]``: see `tests.chaos.run`; ``nox -s chaos``."""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from lockkit_tools.history import write
from tests.chaos.run import run_on
from tests.chaos.targets import TARGETS


def main() -> int:
    """Run the targets one after the other; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Kill, freeze, restart; find overlaps.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of: {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=float, default=120.0, help="of faults, for each target (default: 120)")
    parser.add_argument("--seed", type=int, default=None, help="of a run to be repeated")
    parser.add_argument("--processes", type=int, default=6, help="client processes (default: 6)")
    parser.add_argument("--history", type=Path, help="write the calls of all clients to this file: .edn or .json")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are: {', '.join(TARGETS)}")
    seed = secrets.randbelow(2**32) if given.seed is None else given.seed
    _say(f"seed {seed} (repeat with --seed={seed}), {given.seconds:g} s each")
    failed = False
    names = given.targets or list(TARGETS)
    for name in names:
        history = given.history
        if history is not None and len(names) > 1:
            history = history.with_stem(f"{history.stem}-{name}")
        failed |= play(name, given.seconds, seed, given.processes, history)
    return int(failed)


def play(name: str, seconds: float, seed: int, processes: int, history: Path | None = None) -> bool:
    """Run one target, print its row and write its history; tell whether a promise was broken."""
    entry = TARGETS[name]
    directory = Path(tempfile.mkdtemp(prefix=f"lockkit-chaos-{name}-"))
    outcome = run_on(entry, directory, seconds, seed=seed, processes=processes)
    row = "  ".join(f"{column} {count}" for column, count in outcome.row().items())
    _say(f"{name}: {row}" + (f"  ({entry.note})" if entry.note else ""))
    if history is not None:
        write(history, outcome.verdict.calls)
        _say(f"  history: {history}; python -m lockkit_tools.history {history} --model=fenced-mutex checks it")
    if not outcome.failed:
        shutil.rmtree(directory)
        return False
    for line in [*outcome.verdict.overlaps, *outcome.verdict.disorder][:20]:
        _say(f"  {line}")
    _say(f"  journal and errors of the clients: {directory}")
    return True


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - its output


if __name__ == "__main__":
    sys.exit(main())
