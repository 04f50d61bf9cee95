"""
Writes the pages of the docs that are made from runs and declarations; a test holds that they are up to date.

==============================================  =======================================================
``nox -s comparison``                           writes them anew, from the committed runs
``nox -s comparison -- FILE``                   takes over a run of ``lockkit bench --json`` first
``nox -s comparison -- primitives FILE``        the same with the part about readers, permits, elections and once
``nox -s comparison -- scale FILE``             the same with the part about scale
``nox -s comparison -- idle FILE``              the same with the part about idle waiters
``nox -s comparison -- extras``                 installs each extra of lockkit and measures it first
==============================================  =======================================================
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path

from tests.comparison import (
    capability_page,
    choice_page,
    extras,
    extras_page,
    measured_page,
    peers_page,
    runs,
    scale_page,
)

STYLE = runs.RUNS.parent / "charts.css"

COLOURS = """\
/* Written by `nox -s comparison`: the plots of `lockkit bench --html` in the colours of this site. */
.md-typeset .chart {
  --ink: var(--md-default-fg-color); --soft: var(--md-default-fg-color--light);
  --rule: var(--md-default-fg-color--lighter); --grid: var(--md-default-fg-color--lightest);
  --lockkit: #2066c4; --peer: #9aa5b1; --baseline: #c9a24a; --bad: #c23b2e;
  margin: 1em 0; max-width: 42rem;
}
[data-md-color-scheme="slate"] .md-typeset .chart {
  --lockkit: #5b9df0; --peer: #77828e; --baseline: #b28f42; --bad: #f07d71;
}
"""


def style() -> str:
    """What the plots in the pages look like."""
    return COLOURS + files("lockkit_tools.bench.page").joinpath("charts.css").read_text()


PAGES: dict[Path, Callable[[], str]] = {
    capability_page.PAGE: capability_page.text,
    choice_page.PAGE: choice_page.text,
    extras_page.PAGE: extras_page.text,
    measured_page.PAGE: measured_page.text,
    **{part.page: partial(measured_page.part_text, part) for part in measured_page.PARTS},
    peers_page.PAGE: peers_page.text,
    scale_page.PAGE: scale_page.text,
    STYLE: style,
}


def main(arguments: Sequence[str]) -> None:
    """Take over what is new, write all pages, and say which of them changed."""
    run = runs.BENCH
    for argument in arguments:
        if argument == "extras":
            extras.record()
        elif argument in {"primitives", "scale", "idle"}:
            run = runs.RUNS / f"{argument}.json"
        else:
            run.write_text(runs.dump(runs.kept(json.loads(Path(argument).read_text()))))
    for page, text in PAGES.items():
        before, after = page.read_text() if page.exists() else "", text()
        page.parent.mkdir(exist_ok=True)
        page.write_text(after)
        sys.stdout.write(f"{page}: {'as it was' if before == after else 'changed'}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
