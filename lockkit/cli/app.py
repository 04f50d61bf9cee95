"""
The command line, and what the commands share.

Each command is a class in a module of its topic: the fields are its options, the docstring is its help, and `run` does
what it is for. Times are seconds; None means that an option was not given.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, dataclass_transform, get_type_hints

import typer
from typer.core import TyperGroup

import lockkit
from lockkit import validation
from lockkit.cli.output import reporting, set_verbosity
from lockkit.cli.signals import interrupted_by_signals
from lockkit.cli.usage import Command
from lockkit.errors import DOCUMENTATION, LockError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_MODULES = {
    "run": "run", "elect": "run", "hold": "hold", "demo": "demo", "once": "once", "holders": "holders",
    "note": "holders", "break": "holders", "list": "holders", "watch": "watch", "wait": "holders", "limit": "backends",
    "ping": "backends", "migrate": "backends", "backends": "backends", "doctor": "backends", "verify": "backends",
}  # fmt: skip
"""In which module each command is, in the order of the help. It is loaded when somebody asks for the command."""

_MEANT = {"lock": "run", "unlock": "break", "status": "list' or 'holders", "help": "--help"}
"""Commands that people expect, too far from ours for a guess by the letters."""

_TOOLS = {"bench", "lab"}
"""Commands of the distribution lockkit-tools."""


def _more_commands() -> dict[str, EntryPoint]:
    """Find the commands that other distributions add: each entry point is a function that gets the `typer.Typer`."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - 15 ms, which `lockkit run` shall not pay

    return {entry.name: entry for entry in entry_points(group="lockkit.commands")}


class _Commands(TyperGroup):
    """The commands of this folder, and those of other distributions."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override] # noqa: ARG002
        return [*_MODULES, *sorted(_more_commands())]

    def get_command(self, ctx: typer.Context, name: str) -> Any:  # type: ignore[override] # noqa: ANN401
        if name in _MODULES:
            import_module(f"lockkit.cli.{_MODULES[name]}")
            holder = _ours[name]
        elif (entry := _more_commands().get(name)) is not None:
            holder = _make_app(TyperGroup)
            entry.load()(holder)
        else:
            if name in _TOOLS and not ctx.resilient_parsing:  # as completion does
                ctx.fail(f"{name!r} is a command of lockkit-tools: pip install lockkit-tools")
            return None
        return typer.main.get_group(holder).commands[name]

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override] # noqa: ANN401
        name = args[0]
        if name not in {*_MODULES, *_TOOLS} and not name.startswith("-") and not ctx.resilient_parsing:
            known = self.list_commands(ctx)
            if name not in known:
                meant = [_MEANT[name]] if name in _MEANT else difflib.get_close_matches(name, known, n=1)
                ctx.fail(f"No such command {name!r}." + "".join(f" Did you mean '{one}'?" for one in meant))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override] # noqa: ANN401
        with interrupted_by_signals(), reporting():
            return super().invoke(ctx)


class _App(typer.Typer):
    """Makes each command a `Command` of lockkit."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": Command, **options})


def _make_app(cls: type[TyperGroup]) -> typer.Typer:
    return _App(
        cls=cls,
        name="lockkit",
        no_args_is_help=True,
        add_completion=cls is _Commands,
        # Plain help: it is the reference that the documentation shows, and reads the same in a pipe and on a terminal.
        rich_markup_mode=None,
        # A traceback means a bug of lockkit; one with the values of variables could show a password.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        epilog=f"Documentation: {DOCUMENTATION}",
    )


app = _make_app(_Commands)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - called by typer
    if wanted:
        typer.echo(f"lockkit {lockkit.__version__}")
        raise typer.Exit


_VERBOSE = "Show on stderr what lockkit notices (reconnections, losses); -vv shows all that it logs."


@app.callback()
def _lockkit(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, show_default=False, help=_VERBOSE)] = 0,
) -> None:
    """One lock for several processes, machines or services, over what you already run."""
    del version  # dealt with by its callback
    set_verbosity(verbose)


_ours: dict[str, typer.Typer] = {}
"""The commands of the modules that are loaded."""


C = TypeVar("C")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def options(made: type[C]) -> type[C]:
    """Make the fields of a class the options of a command."""
    return dataclass(frozen=True, kw_only=True)(made)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def command(name: str, short: str, cls: type[Command] = Command) -> Callable[[type[C]], type[C]]:
    """Make a command of a class, whose `run` gives the exit status; None is 0."""

    def decorate(made: type[C]) -> type[C]:
        _ours[name] = _make_app(TyperGroup)
        add(_ours[name], name, short, options(made), cls)
        return made

    return decorate


def add(holder: typer.Typer, name: str, short: str, made: type[Any], cls: type[Command] = Command) -> None:
    """Add a command to a program: the entry point of another distribution is called with the program."""
    types = get_type_hints(made)

    def call(**given: Any) -> None:
        raise typer.Exit(made(**given).run() or 0)

    parameters = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=types[one.name])
        for one in fields(made)
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # what typer reads
    holder.command(name, cls=cls, help=inspect.getdoc(made), short_help=short)(call)


# -- what the parser makes of the values -------------------------------------------------------------------------------


def _duration(value: str | float) -> float:
    """Parse the value of an option that is a time; a default is a number already."""
    if isinstance(value, float | int) or value.lower() in {"nan", "inf", "-inf"}:
        return float(value)  # of these the check of the range says what is wrong
    try:
        return validation.parse_duration(value)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, not {value!r}") from error


def seconds(value: float | None) -> float | None:
    """Check a time, for `time`."""
    try:
        return None if value is None else validation.parse_seconds(value)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, not {value:g}") from error


def no_url(value: str | None) -> str | None:
    """Refuse a URL with a password where a name or key belongs, which is shown to everybody; for `argument`."""
    if value is not None and re.match(r"[\w+.-]+://[^/]*(:(?!\d+/).*)?@", value, re.DOTALL):
        raise typer.BadParameter("this looks like a URL: give it with --url")
    return value


# -- options -----------------------------------------------------------------------------------------------------------


def option(default: Any, about: str, *names: str, **more: Any) -> Any:  # noqa: ANN401 - as typer
    """Make an option."""
    return typer.Option(default, *names, help=about, **more)


def flag(about: str, *names: str) -> Any:  # noqa: ANN401
    """Make an option without a value."""
    return typer.Option(False, *names, help=about)  # noqa: FBT003 - its default


def time(default: float | None, about: str, check: Callable[..., object] | None = None) -> Any:  # noqa: ANN401
    """Make an option that is a time."""
    return typer.Option(default, metavar="TIME", parser=_duration, callback=check, help=about)


def argument(default: Any, metavar: str, about: str, **more: Any) -> Any:  # noqa: ANN401
    """Make an argument; required if the default is an ellipsis."""
    return typer.Argument(default, metavar=metavar, help=about, show_default=False, **more)


_BACKEND = (
    "Backend. Default: LOCKKIT_URL, else the profile named by LOCKKIT_ENV, else the profile default; without any "
    "configuration files of this user on this machine. "
    "Put a URL with a password into LOCKKIT_URL or a profile: all users of the machine can see the command line."
)
URL = option(None, _BACKEND, metavar="URL")
URL_ARGUMENT = argument(None, "URL", _BACKEND)
PROFILE = option(None, "Profile of lockkit.toml or pyproject.toml.", metavar="PROFILE")
JSON = flag("Print JSON.", "--json")
METADATA = option(None, "Text that lockkit holders shows. Never a secret.", metavar="TEXT")
TTL = time(
    None,
    "How long the backend keeps the lock without renewal, and so how long others wait after a machine dies. "
    "Default: that of the profile or the URL, else 30.",
)


@options
class OnBackend:
    """The options of a command that names its backend."""

    url: str | None = URL
    profile: str | None = PROFILE


# -- shell completion --------------------------------------------------------------------------------------------------

COMPLETION_SECONDS = 1.0
"""How long a shell waits for names. With a longer one, the tab key blocks for longer while a server does not answer."""

NAMES_MAX = 200
"""Names that are offered. More than a screen of them helps nobody."""

# A shell runs what is on its line: a name with a meaning there, which any client may have chosen, is not offered. Nor
# is one that is an option (-x, --help) or that zsh expands to the path of a program (=ls).
_SAFE = re.compile(r"[\w.,:/@%+][\w.,:/@%+=-]*")


def complete_name(begin: str, url: str | None, profile: str | None) -> list[str]:
    """Name locks that are held."""
    found: list[str] = []

    def read() -> None:
        try:
            with lockkit.connect(url, profile=profile) as client:
                found.extend(islice(filter(_SAFE.fullmatch, client.names(begin)), NAMES_MAX))
        except LockError:
            found.clear()

    # Python prints a warning for which there is no handler: in the middle of what the user types.
    logger, nowhere = logging.getLogger("lockkit"), logging.NullHandler()
    logger.addHandler(nowhere)
    # A daemon: the process ends although a server hangs.
    thread = threading.Thread(target=read, name="lockkit-complete", daemon=True)
    thread.start()
    thread.join(COMPLETION_SECONDS)
    logger.removeHandler(nowhere)
    return sorted(found)


def complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a lock."""
    return complete_name(incomplete, ctx.params.get("url"), ctx.params.get("profile"))


NAME = argument(..., "NAME", "Name of the lock.", callback=no_url, autocompletion=complete)
