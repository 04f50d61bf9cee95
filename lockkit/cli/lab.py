"""``lockkit lab``: plays a scene in which a lock fails, or does not, and draws it."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from lockkit.cli.options import LabOptions
from lockkit.cli.output import print_json
from lockkit.errors import ConfigurationError


def list_scenarios(*, as_json: bool) -> None:
    """Print the scenarios."""
    _require_driver()
    from lockkit.lab import load, scenario_names  # noqa: PLC0415 - needs the driver

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


def lab(name: str, options: LabOptions) -> None:
    """Run a scenario and print or write what happened."""
    _require_driver()
    from lockkit.lab import as_data, load, run, terminal  # noqa: PLC0415 - needs the driver
    from lockkit.lab.html import draw as draw_html  # noqa: PLC0415
    from lockkit.lab.svg import draw as draw_svg  # noqa: PLC0415

    played = run(load(name), backend=options.backend, fenced=options.fenced, seed=options.seed)
    if options.svg is not None:
        _write(options.svg, draw_svg(played))
    if options.html is not None:
        _write(options.html, draw_html(played, _command(name, options)))
    if options.as_json:
        print_json(as_data(played))
    elif options.svg is None and options.html is None:
        console = Console()
        colour = console.is_terminal and not console.no_color
        unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
        print(terminal.draw(played, width=console.width, colour=colour, ascii_only=not unicode), end="")


def _require_driver() -> None:
    """Refuse to run without the driver of Redis, which the backend's own code imports."""
    if find_spec("redis") is None:
        message = "lockkit lab runs the code of the Redis backends: install their driver, pip install 'lockkit[redis]'"
        raise ConfigurationError(message)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise ConfigurationError(message) from error
    print(f"wrote {path}")


def _command(name: str, options: LabOptions) -> str:
    """Give the command line that repeats it."""
    words = ["lockkit", "lab", name]
    if options.backend is not None:
        words += ["--backend", options.backend]
    if options.fenced is not None:
        words.append("--fenced" if options.fenced else "--unfenced")
    if options.seed != 1:
        words += ["--seed", str(options.seed)]
    return shlex.join(words)
