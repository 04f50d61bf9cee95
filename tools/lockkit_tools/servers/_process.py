"""One child process that cannot outlive this interpreter, and the processes below it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from lockkit.units import Seconds

# A process in an uninterruptible system call stops only after it; not worth waiting for.
STOP_TREE_TIMEOUT = 2.0


class Process:
    """
    A running program, ended by SIGKILL when this interpreter dies (on Linux).

    Args:
        command: Absolute path of the program, and its arguments.
        log: File to which its output is added.
    """

    def __init__(self, command: Sequence[str], *, log: Path, cwd: Path, env: Mapping[str, str]) -> None:
        def spawn() -> subprocess.Popen[bytes]:
            with log.open("ab") as output:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=cwd,
                    env=dict(env),
                    # Ctrl-C in the terminal is for the tests; they end their servers.
                    start_new_session=True,
                )

        self._popen = _spawn_in_lasting_thread(spawn)

    @property
    def pid(self) -> int:
        """Process id of the server itself (what set it up became it)."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal, None while it runs."""
        return self._popen.poll()

    def wait(self, timeout: Seconds) -> bool:
        """Waits for the end, at most `timeout` seconds; tells whether it came."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, number: int) -> None:
        """Sends a signal to the main process only; nothing happens after its end."""
        self._popen.send_signal(number)

    def pause(self) -> None:
        """Stops the process and all below it with SIGSTOP; on return all have stopped."""
        self._stop_tree()

    def resume(self) -> None:
        """Lets the process and all below it go on."""
        for pid in reversed([entry.pid for entry in tree(self.pid)]):
            _kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Ends the process and all below it with SIGKILL, as a power cut would."""
        killed: list[int] = []
        if self.returncode is None:
            # Stopped first, so that none forks another while the others are killed.
            killed = self._stop_tree()
            for pid in reversed(killed):
                _kill(pid, signal.SIGKILL)
        self._popen.wait()
        # Each has its memory until it has ended itself: PostgreSQL does not start beside what another one shares.
        deadline = time.monotonic() + STOP_TREE_TIMEOUT
        while not all(map(_has_ended, killed)) and time.monotonic() < deadline:
            time.sleep(0.001)

    def _stop_tree(self) -> list[int]:
        """
        Stops the whole tree and gives its process ids, parents first.

        Looks again until nothing runs: a child may be born between listing and stopping
        its parent (PostgreSQL forks for each connection), and a signal only *asks* the
        kernel: a server may answer one more request before it stops.
        """
        deadline = time.monotonic() + STOP_TREE_TIMEOUT
        before: list[Entry] = []
        while self.returncode is None:
            found = tree(self.pid)
            running = [entry.pid for entry in found if not entry.stopped]
            # Twice the same: one look may miss a process while another one ends.
            if (not running and found == before) or time.monotonic() > deadline:
                return [entry.pid for entry in found]
            before = found
            for pid in running:
                _kill(pid, signal.SIGSTOP)
        return []


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the system's process table."""

    pid: int
    parent: int
    state: str

    @property
    def stopped(self) -> bool:
        """Whether it executes nothing: stopped by a signal, or dead already."""
        return self.state[0] in "TtZX"


def tree(root: int) -> list[Entry]:
    """The process `root` and all processes below it, parents before their children."""
    if os.path.exists(f"/proc/self/task/{os.getpid()}/children"):  # noqa: PTH110 - asked often
        return _tree_by_children(root)
    below: dict[int, list[Entry]] = {}
    found: list[Entry] = []
    for entry in process_table():
        below.setdefault(entry.parent, []).append(entry)
        if entry.pid == root:
            found.append(entry)
    for entry in found:  # grows while it is walked
        found += below.get(entry.pid, [])
    return found


def _tree_by_children(root: int) -> list[Entry]:
    """By what Linux tells of each process: to read the whole table takes 10 ms where 200 processes run."""
    found = [entry] if (entry := find_process(root)) is not None else []
    for parent in found:  # grows while it is walked
        try:
            tasks = os.listdir(f"/proc/{parent.pid}/task")  # noqa: PTH208 - names alone
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        for task in tasks:
            children = _read(f"/proc/{parent.pid}/task/{task}/children").split()
            found += [child for pid in children if (child := find_process(int(pid))) and child.parent == parent.pid]
    return found


def find_process(pid: int) -> Entry | None:
    """One process of the table."""
    if not sys.platform.startswith("linux"):
        return next((entry for entry in process_table() if entry.pid == pid), None)
    # The second field is the name in parentheses, and may itself hold ") R 1".
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return Entry(pid, int(fields[1]), fields[0]) if fields else None


def _has_ended(pid: int) -> bool:
    """Whether nothing is left of a process, or only what its parent has not asked for."""
    entry = find_process(pid)
    return entry is None or entry.state.startswith(("Z", "X"))


def _read(path: str) -> str:
    """A file of /proc; empty if its process has ended."""
    try:
        return Path(path).read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def process_table() -> list[Entry]:
    """All processes of this machine that we can see."""
    if not sys.platform.startswith("linux"):
        columns = ["ps", "-axo", "pid=,ppid=,state="]
        lines = subprocess.run(columns, check=True, capture_output=True, text=True).stdout
        return [Entry(int(pid), int(parent), state) for pid, parent, state in map(str.split, lines.splitlines())]
    names = [directory.name for directory in Path("/proc").iterdir()]
    return [entry for name in names if name.isdigit() and (entry := find_process(int(name)))]


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself, which is what any signal may race with


class _Spawner(threading.Thread):
    """
    Starts processes, and lives as long as the interpreter.

    PR_SET_PDEATHSIG counts from the *thread* that forked, not from its process: a server
    started by a fixture in a worker thread would be killed when that thread ends.
    """

    def __init__(self) -> None:
        super().__init__(name="lockkit-servers", daemon=True)
        self.jobs: queue.SimpleQueue[tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]] = (
            queue.SimpleQueue()
        )

    def run(self) -> None:
        while True:
            job, answer = self.jobs.get()
            try:
                answer.set_result(job())
            except BaseException as error:  # noqa: BLE001 - handed to who asked
                answer.set_exception(error)


_spawners: dict[int, _Spawner] = {}
_spawners_lock = threading.Lock()


def _spawn_in_lasting_thread(
    job: Callable[[], subprocess.Popen[bytes]],
) -> subprocess.Popen[bytes]:
    with _spawners_lock:
        # By pid, because a forked child has a copy of this table but not of the thread.
        if (spawner := _spawners.get(os.getpid())) is None:
            spawner = _spawners[os.getpid()] = _Spawner()
            spawner.start()
    answer: Future[subprocess.Popen[bytes]] = Future()
    spawner.jobs.put((job, answer))
    return answer.result()
