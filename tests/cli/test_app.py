"""The command line as a whole: help, version, what it loads, and ``lockkit backends``."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest

from lockkit.configuration import registry
from lockkit.errors import DOCUMENTATION
from tests.cli.support import Cli, run_here

COMMANDS = (
    *("run", "elect", "hold", "demo", "holders", "break", "list", "watch", "wait", "limit", "ping", "migrate"),
    *("backends", "doctor", "verify", "lab", "bench"),
)
DRIVERS = {"redis", "kazoo", "grpc", "sqlalchemy", "psycopg", "pymysql"}


def test_script_is_installed() -> None:
    """``lockkit`` is this."""
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="lockkit")

    assert script.value == "lockkit.cli:main"


def test_help_lists_the_commands() -> None:
    """Each with what it does."""
    done = run_here("--help")

    assert done.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout
    assert f"Documentation: {DOCUMENTATION}" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str) -> None:
    """The reference is made from it."""
    done = run_here(command, "-h")

    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: lockkit {command}")
    assert "[[" not in done.stdout.partition("\n")[0]  # typer itself marks what may be left out
    assert re.search(r"<int|<list|range>", done.stdout) is None


@pytest.mark.parametrize("command", ["run", "hold"])
def test_help_follows_the_width_of_the_terminal(cli: Cli, command: str) -> None:
    """Its tables too."""
    cli.env["COLUMNS"] = "60"

    shown = cli.run(command, "--help").stdout

    assert max(map(len, shown.splitlines())) <= 60
    assert re.search(r"^    128 \+ n {2,}signal n ", shown, re.MULTILINE)
    assert "option, profile, credentials" in " ".join(shown.split())


def test_version() -> None:
    """That of the package."""
    assert run_here("--version").stdout == f"lockkit {importlib.metadata.version('lockkit')}\n"


def test_without_a_command_there_is_the_help() -> None:
    """As with ``--help``."""
    done = run_here()

    assert "Usage: lockkit" in done.stdout + done.stderr


def test_usage_has_the_words_of_the_documentation() -> None:
    """NAME and COMMAND, not the types of Python or the classes of its errors."""
    help_shown = run_here("run", "--help").stdout

    assert help_shown.startswith("Usage: lockkit run [OPTIONS] NAME COMMAND...\n")
    assert re.search(r"^  NAME +Name of the lock", help_shown, re.MULTILINE)
    assert re.search(r"^  COMMAND +What to run", help_shown, re.MULTILINE)


def test_lab_without_a_scenario_lists_them() -> None:
    """As with ``--list``."""
    done = run_here("lab")

    assert done.exit_code == 0, done.stderr
    assert done.stdout == run_here("lab", "--list").stdout
    assert "gc-pause" in done.stdout


@pytest.mark.parametrize("name", ["bench", "lab"])
def test_command_of_the_tools_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lockkit alone is installed, the help does not list it either."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())

    done, listed = run_here(name), run_here("--help")

    assert done.exit_code == 2
    assert f"{name!r} is a command of lockkit-tools: pip install lockkit-tools" in done.stderr
    assert re.search(rf"^  {name}\b", listed.stdout, re.MULTILINE) is None


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extra_is_one_line(cli: Cli, missing: str) -> None:
    """It says what to install."""
    script = f"import sys; sys.modules[{missing!r}] = None; from lockkit.cli import main; main()"
    process = cli.start_program(sys.executable, "-c", script)

    out, err = process.communicate(timeout=60)

    assert (process.returncode, out) == (78, "")
    assert err == f"lockkit: the command line needs {missing}: pip install 'lockkit[cli]'\n"


def loaded(cli: Cli, *args: str) -> set[str]:
    """Modules that a command has loaded when it ends."""
    script = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))\n"
        f"sys.argv = ['lockkit', *{list(args)!r}]\n"
        "from lockkit.cli import main\nmain()"
    )
    process = cli.start_program(sys.executable, "-c", script)
    _, err = process.communicate(timeout=60)
    return set(json.loads(err.splitlines()[-1]))


def test_help_loads_no_driver_and_no_backend(cli: Cli) -> None:
    """It is quick."""
    modules = loaded(cli, "run", "--help")

    assert modules.isdisjoint(DRIVERS | {"lockkit_tools.bench"})
    assert not any(name.startswith("lockkit.backends.") for name in modules)


def test_run_loads_what_it_needs(cli: Cli) -> None:
    """A crontab line starts it every minute."""
    modules = loaded(cli, "run", "a", "--", "true")

    assert "lockkit.backends.file.backend" in modules
    assert modules.isdisjoint(DRIVERS | {"lockkit_tools.bench"})


def test_backends_shows_every_scheme(cli: Cli) -> None:
    """Those without a driver too, with what to do."""
    done = cli.run("backends")

    assert done.returncode == 0
    for scheme in (*registry.BUILTIN, "faulty"):
        assert re.search(rf"\b{re.escape(scheme)}\b", done.stdout)
    assert "Excludes only on this machine" in done.stdout
    assert "driverless: not available" in done.stdout
    assert "lockkit-faulty" in done.stdout


@pytest.mark.parametrize("width", [60, 80, 100])
def test_backends_follow_the_width_that_is_asked_for(width: int) -> None:
    """In a pipe, such as that of watch(1), as on a terminal."""
    lines = run_here("backends", columns=width).stdout.splitlines()

    assert max(map(len, lines)) <= width
    assert all(any(word in line for line in lines) for word in ("excludes", "rediss+sentinel:", "clients"))


def test_backends_as_json(cli: Cli) -> None:
    """Their capabilities, as the library has them."""
    rows = json.loads(cli.run("backends", "--json").stdout)

    by_scheme = {scheme: row for row in rows for scheme in row["schemes"]}
    assert by_scheme.keys() == {*registry.schemes(), "faulty", "sieve", "driverless"}
    assert by_scheme["file"]["available"] is True
    assert by_scheme["file"]["capabilities"]["scope"] == "machine"
    assert by_scheme["driverless"]["available"] is False
    assert by_scheme["driverless"]["capabilities"] is None
    assert "no_such_driver" in by_scheme["driverless"]["problem"]


def test_database_without_its_driver_is_not_available(cli: Cli) -> None:
    """SQLAlchemy alone locks nothing there."""
    cli.env |= {"PSYCOPG_IMPL": "none"}

    rows = json.loads(cli.run("backends", "--json").stdout)

    missing = [row for row in rows if "postgresql" in row["schemes"]]
    assert [row["mode"] for row in missing] == ["table", "row", "advisory"]
    assert not any(row["available"] for row in missing)
    assert all("pip install 'lockkit[postgresql]'" in row["problem"] for row in missing)


@pytest.mark.parametrize("no_color", [False, True])
def test_no_color_counts_even_where_colours_are_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, no_color: bool
) -> None:
    """NO_COLOR is the user's last word; without it an error is red."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    tmp_path.chmod(0o777)

    done = run_here("doctor", f"file:{tmp_path}")

    assert done.exit_code == 1
    assert ("31m" not in done.stdout) is no_color
