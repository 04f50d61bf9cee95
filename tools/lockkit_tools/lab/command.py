"""``lockkit lab``: its options. What it does is loaded when it is run."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lockkit.cli.app import JSON, add, argument, flag, option, options
from lockkit.cli.output import print_json
from lockkit.errors import ConfigurationError

if TYPE_CHECKING:
    import typer


@options
class Lab:
    """
    Play a scene in which a lock fails, or does not, and draw it: who held the lock when, and what became of the writes.

    It runs in simulated time, in less than a second, without a server: lockkit's own code on simulated machines. The
    verdict says which promise held, which broke, and what to change. The same seed gives the same picture everywhere.

    Exit status: 0, whatever the verdict; 78 if the scenario or an option is wrong.
    """

    scenario: str | None = argument(None, "SCENARIO", "Name of a scenario. Without it: list the scenarios.")
    list_all: bool = flag("List the scenarios.", "--list")
    backend: str | None = option(
        None,
        "Only the scenes that run on it: redis, redis+sentinel, redlock, etcd, zookeeper, by-hand; with "
        "options such as redlock?durable=on. Default: all scenes, each on its own.",
        metavar="BACKEND",
    )
    fenced: bool | None = option(
        None,
        "Whether storage compares fencing tokens. Default: as the scenario says.",
        "--fenced/--unfenced",
        show_default=False,
    )
    seed: int = option(1, "Seed of the simulated latencies.", metavar="N", min=0)
    svg: Path | None = option(None, "Write a picture instead of printing.", metavar="FILE", dir_okay=False)
    html: Path | None = option(None, "Write a web page instead of printing.", metavar="FILE", dir_okay=False)
    as_json: bool = JSON

    def run(self) -> None:
        if find_spec("redis") is None:
            raise ConfigurationError(
                "lockkit lab runs the code of the Redlock backend: install its driver, pip install 'lockkit[redis]'"
            )
        if self.list_all or self.scenario is None:
            _list_scenarios(as_json=self.as_json)
            return
        from lockkit_tools.lab import as_data, load, run, terminal  # noqa: PLC0415 - needs the driver
        from lockkit_tools.lab.html import draw as draw_html  # noqa: PLC0415
        from lockkit_tools.lab.svg import draw as draw_svg  # noqa: PLC0415

        played = run(load(self.scenario), backend=self.backend, fenced=self.fenced, seed=self.seed)
        if self.svg is not None:
            _write(self.svg, draw_svg(played))
        if self.html is not None:
            _write(self.html, draw_html(played, self._command(self.scenario)))
        if self.as_json:
            print_json(as_data(played))
        elif self.svg is None and self.html is None:
            console = Console()
            unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
            console.print(terminal.draw(played, width=console.width, ascii_only=not unicode), soft_wrap=True)

    def _command(self, scenario: str) -> str:
        """Give the command line that repeats it."""
        words = ["lockkit", "lab", scenario]
        if self.backend is not None:
            words += ["--backend", self.backend]
        if self.fenced is not None:
            words.append("--fenced" if self.fenced else "--unfenced")
        if self.seed != 1:
            words += ["--seed", str(self.seed)]
        return shlex.join(words)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    add(app, "lab", "Play a scene in which a lock fails, and draw it.", Lab)


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
        raise ConfigurationError(f"cannot write {path}: {error.strerror or error}") from error
    print(f"wrote {path}")
