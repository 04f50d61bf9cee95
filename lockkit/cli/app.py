"""The commands and their options. Each command's own module is loaded when it is run, so that ``--help`` is quick."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import lockkit
from lockkit import validation
from lockkit.cli.options import Face, FailOn, OnBusy, RunOptions
from lockkit.cli.output import reporting
from lockkit.cli.status import RUN_STATUSES

__all__ = ["app"]


class _Commands(TyperGroup):
    """The commands below, and ``bench``, which is loaded only when it is wanted: it brings much along."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Name all commands, in the order of the help."""
        return [*super().list_commands(ctx), *(["bench"] if _has_bench() else [])]

    def get_command(self, ctx: typer.Context, name: str) -> Any:  # type: ignore[override] # noqa: ANN401
        """Give the command of that name, or None."""
        if name != "bench" or not _has_bench():
            return super().get_command(ctx, name)
        holder = _make_app(TyperGroup)
        import_module("lockkit.bench.command").register(holder)
        return typer.main.get_group(holder).commands["bench"]

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override] # noqa: ANN401
        """Run the command; report errors of the library as one line and an exit status."""
        with reporting():
            return super().invoke(ctx)


def _has_bench() -> bool:
    # find_spec of an inner module imports the outer one, which must exist for that.
    return find_spec("lockkit.bench") is not None and find_spec("lockkit.bench.command") is not None


def _make_app(cls: type[TyperGroup]) -> typer.Typer:
    return typer.Typer(
        cls=cls,
        name="lockkit",
        no_args_is_help=True,
        add_completion=False,
        # Plain help: it is the reference that the documentation shows, and reads the same in a pipe and on a terminal.
        rich_markup_mode=None,
        # A traceback means a bug of lockkit; one with the values of variables could show a password.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


app = _make_app(_Commands)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The lock.", show_default=False)]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Backend. By default that of LOCKKIT_URL, of the profile named by LOCKKIT_ENV, or files of this user. "
        "A URL with a password belongs there: the command line is visible to all users of the machine.",
    ),
]
Profile = Annotated[
    str | None,
    typer.Option("--profile", metavar="PROFILE", help="Profile of lockkit.toml or pyproject.toml."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - called by typer
    if wanted:
        typer.echo(f"lockkit {lockkit.__version__}")
        raise typer.Exit


def _seconds(value: float | None) -> float | None:
    try:
        return None if value is None else validation.parse_seconds(value)
    except ValueError as error:
        message = f"{error}, not {value:g}"
        raise typer.BadParameter(message) from error


@app.callback()
def _lockkit(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One lock for several processes, machines or services, over what you already run."""
    del version  # dealt with by its callback


_width = max(len(status) for status, _ in RUN_STATUSES)
_RUN_HELP = """
Run a command under a lock: lockkit run NAME --on-busy=skip -- COMMAND ARGUMENT...

COMMAND gets a process group of its own. Signals are forwarded to it, its exit status becomes lockkit's, and the lock
is released when it ends. Put -- in front of it, so that its options are not taken for lockkit's.

If the lease is lost, or about to end because it cannot be renewed, the whole process group gets SIGTERM, and SIGKILL
after --signal-grace: all before the deadline, at which another client may be granted the lock. A guard process does the
same if lockkit itself is killed or stopped. Processes that have left the process group (daemons), and whatever runs
while the whole machine is paused, are protected only by storage that checks LOCKKIT_TOKEN.
When COMMAND ends by itself, processes that it leaves behind go on, without the lock.

COMMAND finds in its environment:

\b
  LOCKKIT_NAME      the lock
  LOCKKIT_TOKEN     the fencing token of this grant
  LOCKKIT_OWNER     the random id of this acquisition
  LOCKKIT_DEADLINE  end of the lease if it is never renewed: seconds of
                    CLOCK_BOOTTIME (macOS: CLOCK_MONOTONIC)

Exit status:

\b
""" + "\n".join(f"  {status:<{_width}}  {meaning}" for status, meaning in RUN_STATUSES)


@app.command("run", help=_RUN_HELP, short_help="Run a command under a lock.")
def _run(
    *,
    name: Name,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What to run.", show_default=False)],
    url: Url = None,
    profile: Profile = None,
    ttl: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long the backend keeps the lock without renewal, and so how long others wait for a machine that "
            "died. By default the profile's or the URL's, else 30.",
        ),
    ] = None,
    on_busy: Annotated[
        OnBusy,
        typer.Option(help="If another client holds the lock: wait for it; fail with 75; or skip, that is end with 0."),
    ] = OnBusy.WAIT,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long to wait for the lock. By default without limit, and not at all with fail and skip.",
        ),
    ] = None,
    signal_grace: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            callback=_seconds,
            help="From SIGTERM to SIGKILL when the lease is lost; at most half of the ttl. "
            "By default a sixth of the ttl, at most 10.",
        ),
    ] = None,
    kill_after: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", callback=_seconds, help="From a SIGTERM sent to lockkit, which is forwarded, to SIGKILL."
        ),
    ] = 60,
    min_hold: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            callback=_seconds,
            help="Keep the lock at least so long, even if COMMAND ends earlier: for a short job on machines whose "
            "clocks differ.",
        ),
    ] = 0,
    metadata: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Shown by lockkit holders. Never a secret.")
    ] = None,
) -> None:
    from lockkit.cli.run import run  # noqa: PLC0415 - see the module

    options = RunOptions(
        url=url,
        profile=profile,
        ttl=ttl,
        on_busy=on_busy,
        timeout=timeout,
        grace=signal_grace,
        kill_after=kill_after,
        min_hold=min_hold,
        metadata=metadata,
    )
    raise typer.Exit(run(name, command, options))


@app.command("demo", short_help="Sell seats with several processes, without a lock and with one.")
def _demo(
    *,
    url: Url = None,
    profile: Profile = None,
    seats: Annotated[int, typer.Option(min=1, max=100_000, help="Seats to sell.")] = 100,
    processes: Annotated[int, typer.Option(min=2, max=64, help="Processes that sell.")] = 8,
    as_json: Json = False,
) -> None:
    """
    Sell seats with several processes, without a lock and with one.

    The seats stand in a plain file that each process reads, thinks about, and writes. Without --url or --profile the
    lock lies in files of a temporary directory. Ends with 1 if a seat was sold twice under the lock.
    """
    from lockkit.cli.demo import demo  # noqa: PLC0415 - see the module

    raise typer.Exit(demo(url, profile, seats=seats, processes=processes, as_json=as_json))


@app.command("holders", short_help="Show who holds a lock.")
def _holders(*, name: Name, url: Url = None, profile: Profile = None, as_json: Json = False) -> None:
    """Show who holds a lock. Ends with 0 also when nobody does."""
    from lockkit.cli.inspection import show_holders  # noqa: PLC0415 - see the module

    show_holders(name, url, profile, as_json=as_json)


@app.command("break", short_help="Free a lock by force.")
def _break(
    *,
    name: Name,
    url: Url = None,
    profile: Profile = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """
    Free a lock by force, after asking.

    The holder is told by its next renewal, and works on until then: only storage that checks fencing tokens keeps it
    out. Ends with 0 if the lock is free now, with 1 if the answer was no.
    """
    from lockkit.cli.inspection import break_lock  # noqa: PLC0415 - see the module

    raise typer.Exit(break_lock(name, url, profile, yes=yes, as_json=as_json))


@app.command("migrate", short_help="Make the tables of a SQL backend.")
def _migrate(
    *,
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="Backend, with ?mode= and ?table= as your program has them."),
    ] = None,
    profile: Profile = None,
    sql_only: Annotated[
        bool, typer.Option("--sql", help="Print the statements for an empty database, and do not connect.")
    ] = False,
) -> None:
    """
    Make the tables of a SQL backend, and columns that they lack.

    Without it they are made at the first use, unless auto_create=0 or the user may not. It can be run again, and by
    several at once. Without URL the backend is that of LOCKKIT_URL or of the profile.
    """
    from lockkit.cli.migrate import migrate  # noqa: PLC0415 - see the module

    migrate(url, profile, sql_only=sql_only)


@app.command("backends", short_help="Show what each backend promises.")
def _backends(*, as_json: Json = False) -> None:
    """Show what each backend promises, and what to install for those whose driver is missing."""
    from lockkit.cli.backends import show_backends  # noqa: PLC0415 - see the module

    show_backends(as_json=as_json)


@app.command("doctor", short_help="Examine the servers behind a URL.")
def _doctor(
    *,
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL",
            help="Backend. By default that of LOCKKIT_URL, of the profile named by LOCKKIT_ENV, or files of this user. "
            "A URL with a password belongs there: the command line is visible to all users of the machine.",
            show_default=False,
        ),
    ] = None,
    profile: Profile = None,
    ttl: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", callback=_seconds, help="Lease time to judge by. By default the backend's, else 30."
        ),
    ] = None,
    fail_on: Annotated[
        FailOn, typer.Option(help="End with 1 if there is an error; or already if there is a warning.")
    ] = FailOn.ERROR,
    as_json: Json = False,
) -> None:
    """
    Examine the servers behind a URL, and say what can happen to locks there.

    Looks at versions, persistence, replication, rights, clocks, round trips and the like, and changes nothing. Each
    finding has a name that stays the same, its severity, what was seen, what can happen, and what fixes it.

    Ends with 0; 1 if there is a finding as severe as --fail-on; 69 if no server answers; 78 if the URL, a credential or
    an option is wrong.
    """
    from lockkit.cli.doctor import examine  # noqa: PLC0415 - see the module
    from lockkit.doctor import Severity  # noqa: PLC0415

    raise typer.Exit(examine(url, profile, ttl=ttl, fail_on=Severity(fail_on.value), as_json=as_json))


@app.command("verify", short_help="Run the conformance suite on a backend.")
def _verify(
    *,
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL",
            help="Backend. By default that of LOCKKIT_URL, of the profile named by LOCKKIT_ENV, or files of this user. "
            "A URL with a password belongs there: the command line is visible to all users of the machine.",
            show_default=False,
        ),
    ] = None,
    profile: Profile = None,
    face: Annotated[Face | None, typer.Option(help="Only this one. By default both.", show_default=False)] = None,
    only: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only cases with this in their name, or pytest's -k expression.")
    ] = None,
    as_json: Json = False,
) -> None:
    """
    Run the conformance suite on a backend: whether it keeps, on these servers, what every backend promises.

    That takes some minutes. The suite works under a key prefix, in a table or in a directory of its own, and removes it
    at the end; it ends and stops processes of its own, and never a server. It needs the extra testing.

    Ends with 0 if all holds that the backend promises; 1 if a case failed; 69 if no server answers; 78 if the URL, a
    credential or an option is wrong.
    """
    from lockkit.cli.verify import verify  # noqa: PLC0415 - see the module

    raise typer.Exit(verify(url, profile, face=None if face is None else face.value, only=only, as_json=as_json))
