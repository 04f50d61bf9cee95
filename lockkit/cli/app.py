"""The commands and their options. A command's module is loaded when the command runs, so that ``--help`` is quick."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import lockkit
from lockkit.cli.options import (
    BreakOptions,
    ElectOptions,
    Face,
    FailOn,
    HoldOptions,
    Json,
    Name,
    OnDone,
    Profile,
    RunOptions,
    Url,
    UrlArgument,
    WatchOptions,
    complete_names,
    taking,
    time_option,
)
from lockkit.cli.output import reporting, set_verbosity
from lockkit.cli.signals import interrupted_by_signals
from lockkit.cli.status import ELECT_STATUSES, HOLD_STATUSES, RUN_STATUSES
from lockkit.cli.usage import Command, CommandStarter
from lockkit.errors import DOCUMENTATION

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_MEANT = {"lock": "'run'", "unlock": "'break'", "status": "'list' or 'holders'", "help": "'--help'"}
"""Commands that people expect, too far from ours for a guess by the letters."""


_TOOLS = {"bench", "lab"}
"""Commands of the distribution lockkit-tools."""


def _more_commands() -> dict[str, EntryPoint]:
    """Find the commands that other distributions add: each entry point is a function that gets the `typer.Typer`."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - 15 ms, which `lockkit run` shall not pay

    return {entry.name: entry for entry in entry_points(group="lockkit.commands")}


class _Commands(TyperGroup):
    """The commands below, and those of other distributions."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Name all commands, in the order of the help."""
        return [*super().list_commands(ctx), *sorted(_more_commands())]

    def get_command(self, ctx: typer.Context, name: str) -> Any:  # type: ignore[override] # noqa: ANN401
        """Give the command of that name, or None."""
        command = super().get_command(ctx, name)
        if command is not None:
            return command
        entry = _more_commands().get(name)
        if entry is None:
            if name in _TOOLS and not ctx.resilient_parsing:  # as completion does
                ctx.fail(f"{name!r} is a command of lockkit-tools: pip install lockkit-tools")
            return None
        holder = _make_app(TyperGroup)
        entry.load()(holder)
        return typer.main.get_group(holder).commands[name]

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override] # noqa: ANN401
        """Find the command; of a word that other programs have for it, say what it is here."""
        if args[0] in _MEANT and not ctx.resilient_parsing:  # as completion does
            ctx.fail(f"No such command {args[0]!r}. Did you mean {_MEANT[args[0]]}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override] # noqa: ANN401
        """Run the command; report errors of the library as one line and an exit status."""
        with interrupted_by_signals(), reporting():
            return super().invoke(ctx)


class _App(typer.Typer):
    """Makes each command a `Command` of lockkit."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """Add a command."""
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


@app.callback()
def _lockkit(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose",
            "-v",
            count=True,
            show_default=False,
            help="Show on stderr what lockkit notices (reconnections, losses); -vv shows all that it logs.",
        ),
    ] = 0,
) -> None:
    """One lock for several processes, machines or services, over what you already run."""
    del version  # dealt with by its callback
    set_verbosity(verbose)


_RUN_HELP = """
Run a command under a lock: lockkit run NAME --on-busy=skip -- COMMAND ARGUMENT...

COMMAND runs in its own process group. lockkit forwards signals to it, ends with its exit status, and releases the lock
when COMMAND and the processes that it started have ended: those of its process group, and those that inherited its
descriptors. Put -- before COMMAND, so that lockkit does not read its options.

If the lease is lost, or is about to end because it cannot be renewed, lockkit sends SIGTERM to the whole process group,
and SIGKILL after --signal-grace. Both happen before the deadline, when another client may get the lock. If lockkit
itself is killed or stopped, a guard process kills the group instead. Only storage that checks LOCKKIT_TOKEN protects
you from processes that have left the process group (daemons) and from a machine that is paused as a whole.

COMMAND's environment has these variables:

\b
LOCKKIT_NAME      the lock
LOCKKIT_TOKEN     the fencing token of this grant
LOCKKIT_OWNER     the random id of this acquisition
LOCKKIT_DEADLINE  end of the lease if it is never renewed: seconds of CLOCK_BOOTTIME (macOS: CLOCK_MONOTONIC)
LOCKKIT_ONCE      the slot or key, as NAME@SLOT (with --once-per or --once)

Exit status:

\b
""" + "\n".join(map("  ".join, RUN_STATUSES))


@app.command("run", cls=CommandStarter, help=_RUN_HELP, short_help="Run a command under a lock.")
@taking(RunOptions)
def _run(
    *,
    name: Name,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What to run.", show_default=False)],
    options: RunOptions,
) -> None:
    if options.once_per is not None and options.once is not None:
        message = "give --once-per or --once, not both"
        raise typer.BadParameter(message)
    records_attempts = options.attempts is not None or options.on_done is not OnDone.SKIP
    if options.once_per is None and (options.tz is not None or (options.once is None and records_attempts)):
        message = "--tz needs --once-per; --attempts and --on-done need --once-per or --once"
        raise typer.BadParameter(message)
    from lockkit.cli.run import run  # noqa: PLC0415 - see the module

    raise typer.Exit(run(name, command, options))


_ELECT_HELP = """
Run a command while leading an election: lockkit elect NAME --value ADDRESS -- COMMAND ARGUMENT...

lockkit campaigns until it is elected, and then starts COMMAND, as lockkit run does: in its own process group, with the
same variables (LOCKKIT_TOKEN is the term number), signals and guard. When COMMAND and the processes that it started
have ended by themselves, lockkit resigns and ends with COMMAND's exit status.

If the term is lost, or is about to end because it cannot be renewed, lockkit sends SIGTERM to the whole process group
at the deadline minus --grace, and SIGKILL before the deadline, when another candidate may lead. Then it campaigns
again, and starts COMMAND again for the next term.

Exit status:

\b
""" + "\n".join(map("  ".join, ELECT_STATUSES))


@app.command("elect", cls=CommandStarter, help=_ELECT_HELP, short_help="Run a command while leading an election.")
@taking(ElectOptions)
def _elect(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the election.", show_default=False)],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What to run.", show_default=False)],
    options: ElectOptions,
) -> None:
    from lockkit.cli.run import elect  # noqa: PLC0415 - see the module

    raise typer.Exit(elect(name, command, options))


_HOLD_HELP = """
Hold a lock for the program that starts this process, in any language: lockkit hold NAME --json

When the lock is granted, lockkit writes a line to stdout: granted and the fencing token or, with --json, an object with
event, name, token, owner, ttl, remaining and deadline. It then holds the lock until stdin ends or has a line release,
on SIGTERM, SIGINT or SIGHUP, or until the program has ended; and writes released.

If the lease is lost, or is about to end because it cannot be renewed, lockkit writes lost, with a reason. It ends when
the program has closed stdin or ended, at the latest at the deadline, and does not free the lock before. Treat it as
lost too if the output ends without released. deadline is the end of the lease if it is never renewed: seconds of
CLOCK_BOOTTIME (macOS: CLOCK_MONOTONIC).

Exit status:

\b
""" + "\n".join(map("  ".join, HOLD_STATUSES))


@app.command("hold", help=_HOLD_HELP, short_help="Hold a lock for a program in another language.")
@taking(HoldOptions)
def _hold(*, name: Name, options: HoldOptions) -> None:
    from lockkit.cli.hold import hold  # noqa: PLC0415 - see the module

    raise typer.Exit(hold(name, options))


@app.command("demo", short_help="Sell seats with several processes, without a lock and with one.")
def _demo(
    *,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="Backend of the lock. Default: files in a temporary directory."),
    ] = None,
    profile: Profile = None,
    seats: Annotated[int, typer.Option(metavar="N", min=1, max=100_000, help="Seats to sell.")] = 100,
    processes: Annotated[int, typer.Option(metavar="N", min=2, max=64, help="Processes that sell.")] = 8,
    as_json: Json = False,
) -> None:
    """
    Sell seats with several processes, without a lock and with one.

    The number of free seats is in a plain file, which each process reads and, after a pause, writes. Exit status 1 if
    a seat was sold twice under the lock.
    """
    from lockkit.cli.demo import demo  # noqa: PLC0415 - see the module

    raise typer.Exit(demo(url, profile, seats=seats, processes=processes, as_json=as_json))


@app.command("once", short_help="Show whether something was done once, or forget it.")
def _once(
    *,
    key: Annotated[
        str,
        typer.Argument(metavar="KEY", help="The key of once(); of lockkit run --once, NAME@KEY.", show_default=False),
    ],
    forget: Annotated[
        bool, typer.Option("--forget", help="Forget that KEY is done, so that the next run does it again.")
    ] = False,
    url: Url = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """
    Show whether a key of once() is done, since when and with which result, or who runs it.

    Exit status 0 if it is done, or with --forget was done and is forgotten; 1 if it is not done; 75 while a run is
    under way, which --forget leaves alone; 78 if the backend keeps no such records.
    """
    from lockkit.cli.once import show_once  # noqa: PLC0415 - see the module

    raise typer.Exit(show_once(key, url, profile, forget=forget, as_json=as_json))


@app.command("holders", short_help="Show who holds a lock.")
def _holders(*, name: Name, url: Url = None, profile: Profile = None, as_json: Json = False) -> None:
    """
    Show who holds the lock of that name, permits of the semaphore, or runs the key of once().

    Exit status 0 also if nobody does.
    """
    from lockkit.cli.inspection import show_holders  # noqa: PLC0415 - see the module

    show_holders(name, url, profile, as_json=as_json)


@app.command("break", short_help="Free a lock by force.")
@taking(BreakOptions)
def _break(*, name: Name, options: BreakOptions) -> None:
    """
    Free a lock by force, after asking for confirmation.

    The holder notices at its next renewal and works until then: only storage that checks fencing tokens keeps it out.
    Exit status 0 if the lock is now free; 1 if you answered no, another client held it by then, or it may be data of an
    application (see --force).
    """
    from lockkit.cli.inspection import break_lock  # noqa: PLC0415 - see the module

    raise typer.Exit(break_lock(name, options))


@app.command("list", short_help="List what is held: locks, permits, runs of once().")
def _list(
    *,
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="PREFIX",
            help="List only names that begin with PREFIX, which has no wildcards.",
            show_default=False,
            autocompletion=complete_names,
        ),
    ] = "",
    url: Url = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """
    List what is held: name, kind, host and process of the holder, token, since when, time left, waiters.

    The kind is lock, semaphore with the number of the permit, or once: a run of once() that is under way. Locks are
    acquired and released while the list is made, so it shows no single moment. Exit status 0 also if none is held; 78
    if the backend cannot list its locks.
    """
    from lockkit.cli.listing import show_locks  # noqa: PLC0415 - see the module

    show_locks(prefix, url, profile, as_json=as_json)


@app.command("watch", short_help="Show who holds which locks, as it changes.")
@taking(WatchOptions)
def _watch(
    *,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL|PATTERN",
            help="The backend, as with --url, and names of locks or patterns: * stands for any text, ? for one "
            "character. Default: all locks.",
            show_default=False,
            autocompletion=complete_names,
        ),
    ] = None,
    options: WatchOptions,
) -> None:
    """
    Show who holds which locks, as it changes: a table on a terminal, else one line for each event.

    The table shows holder, mode, token, time left, waiters, for how long the lock is held (>: it was held when the
    watch began), and how many renewals are overdue, once one was seen. The line below the table lists the keys.

    Events: appeared, changed (another holder), renewed, expiring, released; and unreachable, reachable of the server.
    lockkit asks every --interval, so it does not see what begins and ends in between.

    Exit status: 0; 69 if the backend is unavailable at the beginning; 78 if the URL, a credential or an option is
    wrong, or the backend cannot list its locks: then give names; 128 + n if signal n ended it.
    """
    from lockkit.cli.watch import split_url, watch  # noqa: PLC0415 - see the module

    given, patterns = (None, arguments or []) if options.url is not None else split_url(arguments or [])
    raise typer.Exit(watch(patterns, replace(options, url=options.url or given)))


@app.command("wait", short_help="Wait until a lock is free, without acquiring it.")
def _wait(
    *,
    name: Name,
    url: Url = None,
    profile: Profile = None,
    timeout: Annotated[float | None, time_option("How long to wait; 0 asks once. Default: without limit.")] = None,
) -> None:
    """
    Wait until a lock is free, without acquiring it.

    Another client may acquire it at once, so never use this to protect anything: lockkit run does that. lockkit asks
    about every second, and may miss a lock that is free for less than that.

    Exit status: 0 if the lock was free; 75 if it was held until the timeout; 69 if the backend is unavailable; 78 if
    the timeout, the URL, a credential or an option is wrong.
    """
    from lockkit.cli.listing import wait_until_free  # noqa: PLC0415 - see the module

    raise typer.Exit(wait_until_free(name, url, profile, timeout=timeout))


def _cap(value: str | None) -> str | None:
    if value is None or value == "none" or (value.isascii() and value.isdigit()):
        return value
    raise typer.BadParameter(_not_a_cap(value))


def _not_a_cap(value: str) -> str:
    return f"it must be 0 or more permits, or none; not {value}"


class _Limit(Command):
    """``limit``, where a negative number is a wrong N, and no option."""

    def misused(self, args: list[str], program: str) -> str | None:
        """Find a negative number."""
        del program
        return next((_not_a_cap(word) for word in takewhile("--".__ne__, args) if re.fullmatch(r"-\d+", word)), None)


@app.command("limit", cls=_Limit, short_help="Show, set or remove the cap of a semaphore.")
def _limit(
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the semaphore.", show_default=False)],
    cap: Annotated[
        str | None,
        typer.Argument(
            metavar="N|none",
            callback=_cap,
            help="Permits of all clients together; 0 pauses new ones, none removes the cap. Without it: show the cap.",
            show_default=False,
        ),
    ] = None,
    url: Url = None,
    profile: Profile = None,
    as_json: Json = False,
) -> None:
    """
    Show, set or remove the cap of a semaphore, whatever limits its clients have.

    Clients apply a new cap within 5 seconds. Permits that are held stay held.

    Exit status: 0; 69 if the backend is unavailable; 75 if others keep changing caps; 78 if the backend cannot cap
    semaphores.
    """
    from lockkit.cli.backends import limit  # noqa: PLC0415 - see the module

    limit(name, cap, url, profile, as_json=as_json)


@app.command("ping", short_help="Ask a backend for an answer, and time it.")
def _ping(*, url: UrlArgument = None, profile: Profile = None, as_json: Json = False) -> None:
    """
    Ask a backend for an answer, and show how long it took.

    Exit status: 0 if it answers; 69 if it does not; 78 if the URL, a credential or an option is wrong.
    """
    from lockkit.cli.listing import ping  # noqa: PLC0415 - see the module

    ping(url, profile, as_json=as_json)


@app.command("migrate", short_help="Create the tables of a SQL backend.")
def _migrate(
    *,
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="Backend, with the same ?mode= and ?table= as in your program.")
    ] = None,
    profile: Profile = None,
    sql_only: Annotated[
        bool, typer.Option("--sql", help="Print the statements for an empty database instead, without connecting.")
    ] = False,
) -> None:
    """
    Create the tables of a SQL backend, or add missing columns.

    Otherwise lockkit creates them at the first use, unless auto_create=0 is set or the user lacks the right. You can
    run it again, and several at the same time. Without URL, the backend is that of LOCKKIT_URL or the profile.
    """
    from lockkit.cli.backends import migrate  # noqa: PLC0415 - see the module

    migrate(url, profile, sql_only=sql_only)


@app.command("backends", short_help="Show the capabilities of each backend.")
def _backends(*, as_json: Json = False) -> None:
    """Show the capabilities of each backend, and what to install where a driver is missing."""
    from lockkit.cli.backends import show_backends  # noqa: PLC0415 - see the module

    show_backends(as_json=as_json)


@app.command("doctor", short_help="Examine the servers behind a URL.")
def _doctor(
    *,
    url: UrlArgument = None,
    profile: Profile = None,
    ttl: Annotated[
        float | None, time_option("Check the servers for locks with this ttl. Default: the backend's, else 30.")
    ] = None,
    fail_on: Annotated[FailOn, typer.Option(help="Lowest severity that gives exit status 1.")] = FailOn.ERROR,
    as_json: Json = False,
) -> None:
    """
    Examine the servers behind a URL, and report what endangers locks there.

    Checks versions, persistence, replication, rights, clocks, round trips and more, and changes nothing. Each finding
    has a stable name, its severity, what was seen, the risk, and the fix.

    Exit status: 0; 1 if a finding is as severe as --fail-on; 69 if no server answers; 78 if the URL, a credential or an
    option is wrong.
    """
    from lockkit.cli.doctor import examine  # noqa: PLC0415 - see the module
    from lockkit.doctor import Severity  # noqa: PLC0415

    raise typer.Exit(examine(url, profile, ttl=ttl, fail_on=Severity(fail_on.value), as_json=as_json))


@app.command("verify", short_help="Run the conformance suite on a backend.")
def _verify(
    *,
    url: UrlArgument = None,
    profile: Profile = None,
    face: Annotated[
        Face | None, typer.Option(help="Test only the sync or the async API. Default: both.", show_default=False)
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Run only cases with this in their name; or an expression as for pytest -k."),
    ] = None,
    as_json: Json = False,
) -> None:
    """
    Run the conformance suite on a backend: check that on these servers it keeps the promises of every backend.

    It takes some minutes. The suite uses its own key prefix, table or directory and removes it at the end. It kills and
    stops only processes that it started itself, never a server. It needs the extra testing.

    Exit status: 0 if the backend conforms; 1 if a case failed; 69 if no server answers; 78 if the URL, a credential or
    an option is wrong.
    """
    from lockkit.cli.verify import verify  # noqa: PLC0415 - see the module

    raise typer.Exit(verify(url, profile, face=None if face is None else face.value, only=only, as_json=as_json))
