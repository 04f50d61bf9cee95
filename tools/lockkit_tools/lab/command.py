"""``lockkit lab``: its options. What it does is loaded when it is run."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockkit.cli.output import print_json
from lockkit.errors import ConfigurationError

Scenario = Annotated[
    str | None,
    typer.Argument(
        metavar="SCENARIO",
        help="Name of a scenario. Without it: list the scenarios.",
        show_default=False,
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        metavar="BACKEND",
        help="Only the scenes that run on it: redis, redis+sentinel, redlock, etcd, zookeeper, by-hand; with "
        "options such as redlock?durable=on. Default: all scenes, each on its own.",
    ),
]
Fenced = Annotated[
    bool | None,
    typer.Option(
        "--fenced/--unfenced",
        help="Whether storage compares fencing tokens. Default: as the scenario says.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("lab", short_help="Play a scene in which a lock fails, and draw it.")(lab)


def lab(  # the signature is the command line
    *,
    scenario: Scenario = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the scenarios.")] = False,
    backend: Backend = None,
    fenced: Fenced = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the simulated latencies.")] = 1,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write a picture instead of printing.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write a web page instead of printing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """
    Play a scene in which a lock fails, or does not, and draw it: who held the lock when, and what became of the writes.

    It runs in simulated time, in less than a second, without a server: lockkit's own code on simulated machines. The
    verdict says which promise held, which broke, and what to change. The same seed gives the same picture everywhere.

    Exit status: 0, whatever the verdict; 78 if the scenario or an option is wrong.
    """
    if find_spec("redis") is None:
        message = "lockkit lab runs the code of the Redlock backend: install their driver, pip install 'lockkit[redis]'"
        raise ConfigurationError(message)
    if list_all or scenario is None:
        _list_scenarios(as_json=as_json)
        return
    from lockkit_tools.lab import as_data, load, run, terminal  # noqa: PLC0415 - needs the driver
    from lockkit_tools.lab.html import draw as draw_html  # noqa: PLC0415
    from lockkit_tools.lab.svg import draw as draw_svg  # noqa: PLC0415

    played = run(load(scenario), backend=backend, fenced=fenced, seed=seed)
    if svg is not None:
        _write(svg, draw_svg(played))
    if html is not None:
        _write(html, draw_html(played, _command(scenario, backend, fenced=fenced, seed=seed)))
    if as_json:
        print_json(as_data(played))
    elif svg is None and html is None:
        console = Console()
        unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
        console.print(terminal.draw(played, width=console.width, ascii_only=not unicode), soft_wrap=True)


def _list_scenarios(*, as_json: bool) -> None:
    """Print the scenarios."""
    from lockkit_tools.lab import load, scenario_names  # noqa: PLC0415 - needs the driver

    scenarios = [load(name) for name in scenario_names()]
    if as_json:
        print_json(
            [
                {
                    "name": one.name,
                    "title": one.title,
                    "backends": list(dict.fromkeys(str(backend) for scene in one.scenes for backend in scene.backends)),
                }
                for one in scenarios
            ]
        )
        return
    width = max(len(one.name) for one in scenarios)
    for one in scenarios:
        print(f"{one.name:<{width}}  {one.title}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise ConfigurationError(message) from error
    print(f"wrote {path}")


def _command(scenario: str, backend: str | None, *, fenced: bool | None, seed: int) -> str:
    """Give the command line that repeats it."""
    words = ["lockkit", "lab", scenario]
    if backend is not None:
        words += ["--backend", backend]
    if fenced is not None:
        words.append("--fenced" if fenced else "--unfenced")
    if seed != 1:
        words += ["--seed", str(seed)]
    return shlex.join(words)
