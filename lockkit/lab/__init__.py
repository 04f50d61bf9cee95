"""
The lab: scenes in which a lock fails, or does not, on simulated time, with a drawing and a verdict.

::

    from lockkit.lab import load, run

    result = run(load("gc-pause"), fenced=True).results[0]
    print(result.verdict.headline)

``lockkit lab`` on the command line draws them. A scenario is a TOML file, so a bug report can carry one.
"""

from lockkit.lab.record import Record
from lockkit.lab.run import Result, Run, as_data, load, run, scenario_names, story
from lockkit.lab.scenario import Scenario, Scene, Step, read_scenario
from lockkit.lab.verdict import Promise, Verdict, judge

__all__ = [
    "Promise",
    "Record",
    "Result",
    "Run",
    "Scenario",
    "Scene",
    "Step",
    "Verdict",
    "as_data",
    "judge",
    "load",
    "read_scenario",
    "run",
    "scenario_names",
    "story",
]
