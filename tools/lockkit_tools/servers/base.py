"""
Servers as objects: start, stop, kill, pause, restart, and a URL to connect to.

`Service` is what a fixture sees, whatever the server is; `Server` is one local process in
a temporary directory, `ServerGroup` several of them.  A subclass of `Server` writes the
configuration (`prepare`), names the command (`command`) and asks the server whether it is
ready (`ask`); the rest is here.
"""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Generic, Self, TypeVar

from lockkit.units import Seconds
from lockkit_tools.servers._ports import HOST, Ports, is_free
from lockkit_tools.servers._process import Process
from lockkit_tools.servers.errors import PortTaken, ServerError, StartFailed
from lockkit_tools.servers.temporary import TemporaryDirectory
from lockkit_tools.servers.tls import NAMES, Certificates, make_certificates

# Longer makes a failing start slow to report; shorter fails on a busy machine.
START_TIMEOUT = 60.0

# Longer delays the end of a test run by a server that hangs; shorter turns orderly ends
# into crashes, so that the next start has to recover.
STOP_TIMEOUT = 10.0

# Pause between two questions whether the server is ready; it ends early when the server does.
ASK_INTERVAL = 0.01

# How long the port of a server that ended may stay in use.
PORT_TIMEOUT = 10.0


class Service(ABC):
    """
    A server, or several that belong together, as a test uses it.

    A context manager: starts on entry, and on leaving ends and removes everything.
    """

    kind: str
    """Name of the kind, as `python -m lockkit_tools.servers list` shows it."""

    credentials: Mapping[str, str] = MappingProxyType({})
    """Variables of the environment that its clients need, where a URL holds no login."""

    managed: bool = True
    """Whether `kill`, `pause` and the other faults work (False: only its URL is known)."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The lockkit URL to connect to."""

    @abstractmethod
    def start(self) -> Self:
        """Starts it and waits until it answers; nothing happens if it runs already."""

    @abstractmethod
    def stop(self, timeout: Seconds = STOP_TIMEOUT) -> None:
        """Ends it in order; what did not end after `timeout` seconds is killed."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it with SIGKILL, as a crash does; its data stay."""

    @abstractmethod
    def pause(self) -> None:
        """Stops it with SIGSTOP: connections stay open, nothing is answered."""

    @abstractmethod
    def resume(self) -> None:
        """Lets a paused server go on."""

    @abstractmethod
    def erase(self) -> None:
        """Removes the data of a server that does not run."""

    @abstractmethod
    def close(self) -> None:
        """Ends it and removes its directory; may be called twice."""

    def restart(self, *, keep_data: bool = True, crash: bool = False) -> Self:
        """Ends and starts it again, at the same address."""
        if crash:
            self.kill()
        else:
            self.stop()
        if not keep_data:
            self.erase()
        return self.start()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()


class Server(Service):
    """
    One server process on 127.0.0.1, with its files in a temporary directory.

    Args:
        port: Port to listen on; None takes a free one, which it keeps until `close`.
        password: Of the user that `url` names; None: nobody is asked for one.
        durable: Flush changes to the disk, as a real server does.  False is faster, and still survives a crash of the
            process, though not of the machine.
        tls: Listen with TLS, with certificates made for this server (`certificates`).
        settings: Further lines of its configuration, or further flags.
    """

    stop_signal: ClassVar[int] = signal.SIGTERM

    tidies_up: ClassVar[bool] = False
    """Whether it frees something when it ends in order, as shared memory.  Else `close`
    kills it, which is quicker: its data go anyway."""

    run_as: ClassVar[tuple[str, ...]] = ()
    """Accounts to run as when we are root, best first; empty: root will do."""

    host = HOST

    certificate_names = NAMES
    """For which hosts the server's certificate is valid, see `make_certificates`; to be set before it is made."""

    def __init__(
        self,
        *,
        port: int | None = None,
        password: str | None = None,
        durable: bool = False,
        tls: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.password = password
        self.durable = durable
        self.tls = tls
        self.settings = dict(settings or {})
        self._ports = Ports()
        self._chosen_port = port
        self._port_by_use: dict[str, int] = {}
        self._directory: TemporaryDirectory | None = None
        self._process: Process | None = None
        self._certificates: Certificates | None = None
        self._paused = False
        self._was_ready = False

    # What a subclass says about its server.

    @abstractmethod
    def command(self) -> Sequence[str]:
        """The program (absolute path) and its arguments."""

    @abstractmethod
    def ask(self) -> str | None:
        """Asks the server whether it is ready."""

    def prepare(self) -> None:
        """Writes configuration and whatever else must be there; called before each start."""

    def environment(self) -> dict[str, str]:
        """The server's environment: nothing of ours but the path, messages in English."""
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "LC_ALL": "C",
            "TMPDIR": str(self.directory),
            "HOME": str(self.directory),
        }

    # What a test does with it.

    @property
    def port(self) -> int:
        """Port that clients connect to; the same until `close`."""
        return self.port_for("clients")

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._running_process().pid

    @property
    def running(self) -> bool:
        """Whether the process is there (a paused one is)."""
        return self._process is not None and self._process.returncode is None

    @property
    def directory(self) -> Path:
        """Temporary directory with configuration, log and data."""
        if self._directory is None:
            self._directory = TemporaryDirectory(self.kind)
            self._own(self._directory.path)
        return self._directory.path

    @property
    def data(self) -> Path:
        """Directory of the server's data, below `directory`."""
        path = self.directory / "data"
        if not path.exists():
            path.mkdir(mode=0o700)
            self._own(path)
        return path

    @property
    def log(self) -> Path:
        """File with the server's output of all its lives."""
        return self.directory / "server.log"

    @property
    def certificates(self) -> Certificates:
        """The files of an authority, a server and a client, for a server that listens with TLS."""
        if self._certificates is None:
            self._certificates = make_certificates(self.directory, names=self.certificate_names)
        return self._certificates

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        if not self.log.exists():
            return "(no log)"
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:]) or "(the log is empty)"

    def start(self) -> Self:
        if not self.running:
            start_all([self])
        return self

    def stop(self, timeout: Seconds = STOP_TIMEOUT) -> None:
        self.request_stop()
        if self._process is not None and not self._process.wait(timeout):
            self._process.kill()

    def request_stop(self) -> None:
        """Begins an orderly end without waiting for it; a paused server is killed."""
        if self._process is None:
            return
        if self._paused:
            self.kill()
        else:
            self._process.signal(self.stop_signal)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._paused = False

    def pause(self) -> None:
        self._running_process().pause()
        self._paused = True

    def resume(self) -> None:
        self._running_process().resume()
        self._paused = False

    def erase(self) -> None:
        """Removes the data directory of a server that does not run."""
        if self.running:
            raise ServerError(f"{self.kind} at {self.address} runs: stop it before its data go")
        shutil.rmtree(self.data)

    def request_close(self) -> None:
        """Begins the end that `close` waits for."""
        if self.tidies_up:
            self.request_stop()
        else:
            self.kill()

    def close(self) -> None:
        self.request_close()
        self.stop()
        if self._directory is not None:
            self._directory.close()
            self._directory = self._certificates = None
        self._ports.close()
        self._port_by_use.clear()
        self._was_ready = False
        # Last: if Ctrl-C comes before, it is closed when the interpreter ends.
        alive.pop(self, None)

    # The parts of a start, which a group does for all of its members at once.

    def launch(self) -> None:
        """Starts the process without waiting until it answers."""
        self.prepare()
        self._await_ports()
        alive[self] = os.getpid()
        self._paused = False
        self._process = Process(
            [*self._set_up("--pdeathsig=KILL"), *self.command()],
            log=self.log,
            cwd=self.directory,
            env=self.environment(),
        )

    def wait_ready(self) -> None:
        """Asks the launched server until it is ready."""
        process = self._launched_process()
        deadline = time.monotonic() + START_TIMEOUT  # it may have ended already, and that is a failed start
        while (missing := self._missing()) is not None:
            ended = process.wait(ASK_INTERVAL)
            if ended or time.monotonic() > deadline:
                raise self._start_failure(missing, status=process.returncode)
        self._was_ready = True

    def port_for(self, use: str) -> int:
        """The port of this server for `use` (``"clients"``, ``"peers"``), chosen once."""
        if use not in self._port_by_use:
            chosen = self._chosen_port if use == "clients" else None
            self._port_by_use[use] = chosen if chosen is not None else self._ports.reserve()
        return self._port_by_use[use]

    def user(self) -> pwd.struct_passwd | None:
        """The account that the server runs as; None: ours."""
        if os.geteuid() != 0 or not self.run_as:
            return None
        for name in (*self.run_as, "nobody"):
            with suppress(KeyError):
                return pwd.getpwnam(name)
        raise ServerError(f"{self.kind} refuses to run as root, and there is no account 'nobody'")

    def run(self, *command: str, **environment: str) -> str:
        """Runs a program of the server's to its end, as the server's user."""
        done = subprocess.run(
            [*self._set_up(), *command],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=self.directory,
            env=self.environment() | environment,
        )
        if done.returncode != 0:
            raise ServerError(f"{command[0]} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
        return done.stdout

    def _set_up(self, *options: str) -> Sequence[str]:
        """
        The command before a command that has it run as the server's user, with options of setpriv(1).

        Not ``subprocess.run(user=...)``, which uses fork(2) instead of vfork(2): then the handlers of libraries run in
        the child, and gRPC's start threads there, whose files are closed (SIGBUS). And a change of the user clears the
        death signal (prctl(2), PR_SET_PDEATHSIG), so the order matters.
        """
        user = self.user()
        if user is None and not (options and sys.platform.startswith("linux")):
            return ()
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise ServerError("setpriv was not found, which sets up servers: install util-linux")
        account = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups") if user else ()
        return (setpriv, *account, *options)

    def write(self, name: str, text: str, *, mode: int = 0o600) -> Path:
        """Writes a file into the directory that the server can read."""
        path = self.directory / name
        path.write_text(text)
        path.chmod(mode)
        self._own(path)
        return path

    def _await_ports(self) -> None:
        """
        Makes sure that nobody listens at our ports.

        Otherwise somebody else's server may answer our questions before ours finds that it
        cannot listen.  After a restart the port is waited for: the last process of the
        former life may just be ending.
        """
        deadline = time.monotonic() + (PORT_TIMEOUT if self._was_ready else 0)
        for port in self._port_by_use.values():
            while not is_free(port):
                if time.monotonic() > deadline:
                    raise PortTaken(f"{self.kind}: somebody else listens on {self.host}:{port}")
                time.sleep(ASK_INTERVAL)

    def _missing(self) -> str | None:
        try:
            return self.ask()
        except OSError as error:
            return str(error)

    def _start_failure(self, missing: str, *, status: int | None) -> StartFailed:
        what = "did not answer in time" if status is None else f"ended with status {status}"
        return StartFailed(f"{self.kind} at {self.address} {what} ({missing}); its log:\n{self.log_tail()}")

    def _launched_process(self) -> Process:
        if self._process is None:
            raise ServerError(f"{self.kind} does not run; call start() first")
        return self._process

    def _running_process(self) -> Process:
        process = self._launched_process()
        if process.returncode is not None:
            raise ServerError(f"{self.kind} ended with status {process.returncode}; call start() first")
        return process

    def _own(self, path: Path) -> None:
        if (user := self.user()) is not None:
            os.chown(path, user.pw_uid, user.pw_gid)

    def __repr__(self) -> str:
        state = f"pid {self._process.pid}" if self._process and self.running else "not running"
        port = self._port_by_use.get("clients", "no port yet")
        return f"<{type(self).__name__} {self.host}:{port}, {state}>"


class ServerGroup(Service):
    """Several servers that are started, stopped and removed together, and suffer together what is done to them."""

    @property
    @abstractmethod
    def servers(self) -> Sequence[Server]:
        """The members, in the order in which they are started."""

    def arrange(self) -> None:
        """Makes one service of members that answer; called after each start of all."""

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    def pause(self) -> None:
        for server in self.servers:
            server.pause()

    def resume(self) -> None:
        for server in self.servers:
            server.resume()

    def erase(self) -> None:
        """Removes the data of all members."""
        for server in self.servers:
            server.erase()

    def start(self) -> Self:
        if todo := [server for server in self.servers if not server.running]:
            start_all(todo)
            self.arrange()
        return self

    def stop(self, timeout: Seconds = STOP_TIMEOUT) -> None:
        for server in reversed(self.servers):
            server.request_stop()
        for server in self.servers:
            server.stop(timeout)

    def close(self) -> None:
        for server in reversed(self.servers):
            server.request_close()
        for server in self.servers:
            server.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(map(repr, self.servers))}>"


class Member(Server):
    """A server that may lead others."""

    @abstractmethod
    def leads(self) -> bool:
        """Whether this member is the leader, as it sees itself."""


M = TypeVar("M", bound=Member)


class Ensemble(ServerGroup, Generic[M]):
    """
    Members that elect a leader.

    A single member is started with `Server.start` only while the others are a majority; after more were lost, start the
    group: its members wait for each other.

    Args:
        members: All of them; a majority must run.
    """

    def __init__(self, members: Sequence[M]) -> None:
        self.members = list(members)

    @property
    def servers(self) -> Sequence[M]:
        return self.members

    @property
    def url(self) -> str:
        """The scheme of one member's URL, with all members."""
        scheme = self.members[0].url.partition(":")[0]
        return f"{scheme}://{','.join(member.address for member in self.members)}"

    @property
    def leader(self) -> M:
        """The member that leads now."""
        for member in self.members:
            if member.running and member.leads():
                return member
        raise ServerError(f"no member of the {self.kind} leads")

    @property
    def followers(self) -> list[M]:
        """The members that run and do not lead."""
        leader = self.leader
        return [member for member in self.members if member.running and member is not leader]


def start_all(servers: Sequence[Server]) -> None:
    """
    Starts servers at the same time and waits until all of them answer.

    All are launched before the first is waited for, since a member of an ensemble answers
    only when a majority runs.
    """
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_ready()
    except BaseException:
        for server in servers:
            server.kill()
        raise


def wait_until(ask: Callable[[], str | None], *, timeout: Seconds = START_TIMEOUT) -> None:
    """Repeats a question until its answer is None."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            missing = ask()
        except OSError as error:
            missing = str(error)
        if missing is None:
            return
        if time.monotonic() > deadline:
            raise ServerError(f"still waiting after {timeout:g} s: {missing}")
        time.sleep(ASK_INTERVAL)


# What was launched and not closed, with the process that launched them: a forked
# child has this table too, and must not end its parent's servers when it exits.
alive: dict[Service, int] = {}


@atexit.register
def _close_all() -> None:
    mine = [server for server, owner in alive.items() if owner == os.getpid()]
    for server in mine:
        if isinstance(server, Server):
            server.request_close()
    for server in mine:
        server.close()
