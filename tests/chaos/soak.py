"""
A soak: chaos in turns, over all targets and kinds of faults, for as long as one likes.

=================================================  ===================================================================
``nox -s soak -- --hours=8``                       runs; interrupted and started again it goes on with the next turn
``nox -s soak -- DIR DIR --report``                prints what the turns in these directories show
``nox -s soak -- DIR DIR --report --record``       and takes it over into the docs
=================================================  ===================================================================

A turn is one run of `tests.chaos.run` with a relay: one target, one kind of weather, one minute of faults, then calm.
It appends one line to ``turns.jsonl``. What must not be there makes the status 1, and the turn's directory stays, with
its history, journal and errors.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockkit_tools.history import write
from tests.chaos.run import BROKEN, FAULTS, Outcome, run_on
from tests.chaos.targets import TARGETS
from tests.docs.counts import SOAK

WEATHER = (
    FAULTS,
    ("clock", "freeze"),
    ("partition", "cut", "freeze"),
    ("kill", "freeze", "partition", "cut", "clock"),
)
"""What may go wrong in one turn."""

SECONDS, CALM_SECONDS = 60.0, 15.0
"""How long each turn has faults, and then none."""

USED = ("MB", "descriptors", "threads")
GROWTH = (30, 15, 10)
"""What a process uses, as `tests.chaos.run.use` gives it, and by how much it may grow in a turn: more is a leak.
A client of five Redlock nodes opens a dozen connections more while nodes hang. One lost at each fault is more."""

Turn = Mapping[str, Any]


def read(directory: Path) -> list[Turn]:
    """Read the turns of a soak; one whose line was cut off did not end."""
    file = directory / "turns.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def append(directory: Path, turn: Turn) -> None:
    """Add a turn, after what ends in a newline."""
    file = directory / "turns.jsonl"
    text = file.read_text() if file.exists() else ""
    with file.open("r+" if file.exists() else "w") as out:
        out.truncate(len(text[: text.rfind("\n") + 1].encode()))
        out.seek(0, os.SEEK_END)
        out.write(json.dumps(turn) + "\n")


def play(directory: Path, number: int, seed: int, given: argparse.Namespace) -> Turn:
    """Run one turn; what raises is odd too."""
    targets = given.targets
    target = targets[number % len(targets)]
    # By the round too: each target meets each weather.
    faults = WEATHER[(number // len(targets) + number % len(targets) + seed) % len(WEATHER)]
    folder = directory / f"{number:04}-{target}"
    shutil.rmtree(folder, ignore_errors=True)  # of a turn that was interrupted
    folder.mkdir(parents=True)
    began = time.monotonic()
    turn = {"turn": number, "target": target, "faults": faults, "seed": seed + number, "date": time.strftime("%F")}
    try:
        outcome = run_on(
            TARGETS[target], folder, given.seconds, seed=seed + number, processes=given.processes, faults=faults,
            relay=True, calm=given.calm,
        )  # fmt: skip
        turn |= describe(outcome)
        if turn["odd"]:
            write(folder / "history.edn", outcome.verdict.calls)
            (folder / "odd").write_text("\n".join([*outcome.verdict.overlaps, *outcome.verdict.disorder]))
    except Exception:  # noqa: BLE001 - shown, and the next turn goes on
        (folder / "odd").write_text(traceback.format_exc())
        turn |= {"row": {}, "hand-offs": [], "growth": [0, 0, 0], "odd": [f"crash: {sys.exc_info()[1]!r}"[:300]]}
        time.sleep(1)  # a machine on which nothing starts would fill the report
    if not turn["odd"]:
        shutil.rmtree(folder)
    return {**turn, "seconds": round(time.monotonic() - began, 1)}


def describe(outcome: Outcome) -> dict[str, Any]:
    """Give what a turn's line has of its outcome."""
    row = outcome.row()
    growth = [max(after[one] - before[one] for before, after in outcome.used.values()) for one in range(3)]
    odd = [f"{column}: {row[column]}" for column in BROKEN if row[column]]
    odd += [f"leak: {grown} {what}" for what, grown, most in zip(USED, growth, GROWTH, strict=True) if grown > most]
    hand_offs = [round(seconds * 1000, 1) for seconds in outcome.hand_offs]
    return {"row": row, "hand-offs": hand_offs, "used": outcome.used, "growth": growth, "odd": odd}


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Add the turns up, by target."""
    of = {target: [turn for turn in turns if turn["target"] == target] for target in TARGETS}
    return {
        "date": max(turn["date"] for turn in turns),
        "cores": os.cpu_count(),
        "hours": round(sum(turn["seconds"] for turn in turns) / 3600, 2),
        "odd": [f"{turn['target']}, seed {turn['seed']}: {what}" for turn in turns for what in turn["odd"]],
        "rows": [{"target": target, **sums(chosen)} for target, chosen in of.items() if chosen],
    }


def sums(turns: Sequence[Turn]) -> dict[str, float | None]:
    """Give the row of one target."""
    hand_offs = sorted(ms for turn in turns for ms in turn["hand-offs"])
    columns = dict.fromkeys(column for turn in turns for column in turn["row"])
    return {
        "turns": len(turns),
        **{column: sum(turn["row"].get(column, 0) for turn in turns) for column in columns},
        "hand-offs": len(hand_offs),
        "median ms": statistics.median(hand_offs) if hand_offs else None,
        "p99 ms": hand_offs[len(hand_offs) * 99 // 100] if hand_offs else None,
        **{f"more {what}": max(turn["growth"][one] for turn in turns) for one, what in enumerate(USED)},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run turns, or report; 1 if anything is odd."""
    parser = argparse.ArgumentParser(prog="nox -s soak --", description="Chaos on all targets for hours.")
    parser.add_argument("directories", nargs="*", type=Path, default=[Path(".nox/soak-report")], metavar="DIRECTORY")
    parser.add_argument("--hours", type=float, default=1.0, help="in all, also of former runs (default: 1)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of faults a turn (default: {SECONDS:g})")
    parser.add_argument("--calm", type=float, default=CALM_SECONDS, help=f"after them (default: {CALM_SECONDS:g})")
    parser.add_argument("--targets", nargs="+", choices=[*TARGETS], default=[*TARGETS], metavar="TARGET")
    parser.add_argument("--processes", type=int, default=6, help="client processes, besides a relay (default: 6)")
    parser.add_argument("--seed", type=int, default=None, help="of the first turn of a new soak")
    parser.add_argument("--report", action="store_true", help="only report")
    parser.add_argument("--record", action="store_true", help=f"write the report to {SOAK.name} for the docs")
    given = parser.parse_args(arguments)
    if not given.report:
        run(given.directories[0], given)
    found = summary([turn for directory in given.directories for turn in read(directory)])
    for row in found["rows"]:
        _say("  ".join(f"{column} {value}" for column, value in row.items()))
    _say(f"{found['hours']} h; odd: {len(found['odd'])}")
    for line in found["odd"]:
        _say(f"  {line}")
    if given.record:
        SOAK.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(found["odd"]))


def run(directory: Path, given: argparse.Namespace) -> None:
    """Play turns until the hours are over."""
    directory.mkdir(parents=True, exist_ok=True)
    turns = read(directory)
    first = turns[0]["seed"] if turns else secrets.randbelow(2**32) if given.seed is None else given.seed
    while sum(turn["seconds"] for turn in turns) < given.hours * 3600:
        turn = play(directory, len(turns), first, given)
        append(directory, turn)
        turns.append(turn)
        _say(
            f"{turn['turn']} {turn['target']} {'+'.join(turn['faults'])} {turn['seconds']} s: {turn['odd'] or 'sound'}"
        )


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - its output


if __name__ == "__main__":
    sys.exit(main())
