"""
Checks all models, or those that are named, and replays the code: ``python -m tests.models [NAME…] [OPTION…]``.

``--record`` writes what the page on the models shows, and the schedules that `nox -s tests` takes again; ``--draw`` the
schedule of each mutant as a picture.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from tests.models.check import MODELS, PROGRESS, Model, Mutant, Search, SpinFailed, models
from tests.models.drawing import DRAWINGS, draw, path_of
from tests.models.replays import REPLAYS, replay
from tests.models.test_replay import MUTANTS
from tests.simulation.night import be_quiet

RESULTS = MODELS / "results.json"

SCHEDULES = 60
"""How many schedules are replayed against a model. More take longer, half a second each."""


def check(model: Model, run: str, mutant: Mutant | None) -> tuple[str, Search | None]:
    """Search once: what is wrong, and what was found."""
    try:
        found = model.search(run, mutant)
    except SpinFailed as failed:
        return str(failed), None
    expected = "" if mutant is None else mutant.promise
    wrong = "" if found.broken == expected else f"breaks {found.broken or 'no promise'}, not {expected or 'none'}"
    if wrong and found.broken:
        wrong += "".join(f"\n    {step.process} {step.number}: {step.action}" for step in found.trail)
    return wrong, found


def replay_code(model: Model) -> tuple[str, dict[str, Any]]:
    """Replay schedules of the code against a model: what is wrong, and what was replayed."""
    one, began = REPLAYS[model.name], time.monotonic()
    events_count, wrong = 0, []
    with one.followers() as followers, one.traces() as trace:
        for seed, events, allowed in replay(followers, trace, range(SCHEDULES)):
            events_count += len(events)
            if allowed is None:
                wrong.append(f"seed {seed}: undecided")
            elif allowed < len(events):
                wrong.append(f"seed {seed}: not allowed: {events[allowed]}")
        seconds = round(time.monotonic() - began, 1)
        mutants = {name: mutant for name, mutant in MUTANTS.items() if mutant.model == model.name}
        for name, mutant in mutants.items():
            if not mutant.is_refused(followers):
                wrong.append(f"allowed: {name}")
    found = {"schedules": SCHEDULES, "events": events_count, "seconds": seconds, "refused": list(mutants)}
    return "; ".join(wrong), found


def describe(model: Model) -> dict[str, Any]:
    """What the page shows of a model, without what its searches find."""
    return {
        "title": model.title,
        "promises": model.promises,
        "runs": {run: {"flags": flags} for run, flags in model.runs.items()},
        "mutants": [
            asdict(mutant) | {"drawing": str(path_of(model, mutant).relative_to(DRAWINGS))} for mutant in model.mutants
        ],
    }


def main(arguments: list[str]) -> int:
    """Check; the status is 1 if anything is not as it must be."""
    names = [argument for argument in arguments if not argument.startswith("--")]
    chosen = [model for model in models() if not names or model.name in names]
    jobs: list[tuple[Model, str, Mutant | None]] = [(model, run, None) for model in chosen for run in model.runs]
    jobs += [(model, one.run, one) for model in chosen for one in model.mutants]
    failures = 0
    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (model, run, mutant), (broken, found) in zip(jobs, pool.map(lambda job: check(*job), jobs), strict=True):
            what, wrong = f"{model.name} {run} {mutant.define if mutant else ''}".ljust(50), broken
            if found and mutant and not wrong:
                (entry,) = (
                    one
                    for one in results.setdefault(model.name, describe(model))["mutants"]
                    if one["define"] == mutant.define
                )
                if mutant.promise != PROGRESS:  # that nothing can happen after it, no schedule shows
                    entry["schedule"] = found.written
                drawn = draw(model, mutant, found)
                if "--draw" in arguments:
                    path_of(model, mutant).write_text(drawn, encoding="utf-8")
                elif path_of(model, mutant).read_text() != drawn:
                    wrong = "the drawing is of another schedule: --draw"
            failures += bool(wrong)
            if found:
                what += f"{found.states:>9,} states {found.seconds:6.2f} s {mutant.promise if mutant else ''}"
            sys.stdout.write(f"{what} {wrong and 'FAILED: '}{wrong}\n")
            sys.stdout.flush()
            if found and mutant is None:
                numbers = {"states": found.states, "depth": found.depth, "seconds": found.seconds}
                results.setdefault(model.name, describe(model))["runs"][run] |= numbers
    replayed = [model for model in chosen if model.name in REPLAYS]
    with ProcessPoolExecutor(os.cpu_count(), initializer=be_quiet) as processes:  # a mutant changes a whole process
        for model, (wrong, seen) in zip(replayed, processes.map(replay_code, replayed), strict=True):
            failures += bool(wrong)
            results[model.name]["replay"] = seen
            what = f"{model.name} replay".ljust(50)
            sys.stdout.write(
                f"{what}{seen['events']:>9,} events {seen['seconds']:6.2f} s {wrong and 'FAILED: '}{wrong}\n"
            )
    if "--record" in arguments and not failures:
        former = json.loads(RESULTS.read_text()) if names else {}
        RESULTS.write_text(json.dumps(dict(sorted((former | results).items())), indent=2) + "\n")
    return failures > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
