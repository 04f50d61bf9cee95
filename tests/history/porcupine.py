"""
Compares lockkit's checker of histories with Porcupine, which is not lockkit's (`nox -s porcupine`).

Both judge random histories of a fenced lock, right ones and some with planted faults, and the files that are given.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from lockkit_tools.history.checker import check
from lockkit_tools.history.models import MODELS
from lockkit_tools.history.reading import Operation, read
from tests.history.notation import Fault, random_history

PROGRAM = Path(__file__).with_suffix(".go")
MODULE = "github.com/anishathalye/porcupine"
MODEL = MODELS["fenced-mutex"]
WORDS = {"Ok": "valid", "Illegal": "invalid", "Unknown": "unknown"}
COUNT = 500


def lines(name: str, calls: Sequence[Operation]) -> Iterator[Mapping[str, Any]]:
    """Write calls as the lines of a history."""
    moments: dict[int, Mapping[str, Any]] = {}
    for call in calls:
        about = {"process": call.process, "f": call.f, "lock": name}
        moments[call.called] = {**about, "type": "invoke"}
        if call.returned is not None:
            moments[call.returned] = {**about, "type": "ok", "value": call.value}
    for moment in sorted(moments):
        yield moments[moment]


def judge(clone: Path, file: Path) -> dict[str, str]:
    """Have Porcupine judge each lock of a file."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "main.go").write_bytes(PROGRAM.read_bytes())
        module = f"module judge\ngo 1.16\nrequire {MODULE} v1.0.0\nreplace {MODULE} => {clone.resolve()}\n"
        (Path(folder) / "go.mod").write_text(module)
        run = subprocess.run(
            ["go", "run", ".", file.resolve()], cwd=folder, capture_output=True, text=True, check=False
        )
    verdicts = dict(line.rsplit(": ", 1) for line in run.stdout.splitlines())
    if not verdicts:
        sys.exit(run.stderr)
    return {name: WORDS[verdict.partition(",")[0]] for name, verdict in verdicts.items()}


def compare(clone: Path, file: Path) -> Iterator[tuple[str, str, str]]:
    """Give the name of each lock of a file, and both verdicts."""
    theirs = judge(clone, file)
    for name, calls in read(file.read_text()).items():
        yield name, check(calls, MODEL).word, theirs[name]


def main(clone: str, *files: str) -> int:
    """Print how often the two agree; 1 if they ever differ."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as made:
        for fault in get_args(Fault):
            for seed in range(COUNT):
                histories: Iterable[Mapping[str, Any]] = lines(
                    f"{fault or 'right'} {seed}", random_history(seed, MODEL, fault)
                )
                made.writelines(json.dumps(line) + "\n" for line in histories)
        made.flush()
        verdicts = [*compare(Path(clone), Path(made.name))]
    for name in files:
        verdicts += compare(Path(clone), Path(name))
    agreed = Counter(ours for _, ours, theirs in verdicts if ours == theirs)
    print(*(f"both {word}: {count}" for word, count in sorted(agreed.items())), sep="\n")  # noqa: T201 - its output
    for name, ours, theirs in verdicts:
        if ours != theirs:
            print(f"{name}: {ours}, but Porcupine says {theirs}")  # noqa: T201 - its output
    return int(agreed.total() < len(verdicts))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
