"""
The lab: scenes in which a lock fails, or does not, on simulated time, with a drawing and a verdict.

::

    from lockkit_tools.lab import load, run

    result = run(load("gc-pause"), fenced=True).results[0]
    print(result.verdict.headline)

``lockkit lab`` on the command line draws them.
"""

from lockkit_tools.lab.run import Result, Run, as_data, load, run, scenario_names, story

__all__ = ["Result", "Run", "as_data", "load", "run", "scenario_names", "story"]
