"""Servers end when they must, with all of their processes, and only then."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lockkit_tools.servers import (
    PostgresServer,
    RedisServer,
    StartFailed,
    require,
    wait_until,
)
from lockkit_tools.servers._process import tree

# Starts a server, tells its pid and directory, and then does what the test says.
SCRIPT = """
import os, sys
from lockkit_tools.servers import RedisServer
server = RedisServer().start()
print(server.pid, server.directory, flush=True)
{then}
"""


@pytest.fixture(autouse=True)
def _redis() -> None:
    require("redis", local=True)


def is_gone(pid: int) -> str | None:
    """For `wait_until`: what keeps the process from being gone."""
    entries = tree(pid)
    return None if not entries or entries[0].state == "Z" else f"{entries[0]} is there"


def is_gone_thread(native_id: int | None) -> str | None:
    """For `wait_until`: what keeps one of our threads from being gone, where /proc tells."""
    return "the thread is there" if Path(f"/proc/self/task/{native_id}").exists() else None


def run_script(then: str) -> subprocess.Popen[str]:
    """Runs SCRIPT in a new interpreter."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(then=then)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(script: subprocess.Popen[str]) -> tuple[int, Path]:
    """The pid and the directory of the server that the script started."""
    assert script.stdout is not None
    pid, directory = script.stdout.readline().split()
    return int(pid), Path(directory)


def test_interpreter_exit_ends_the_server_and_removes_its_directory() -> None:
    """A script that forgets to stop its server leaves nothing behind."""
    with run_script("") as script:
        pid, directory = said(script)
        assert script.wait(60) == 0

    assert is_gone(pid) is None
    assert not directory.exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_sigkill_of_the_test_process_ends_the_server() -> None:
    """The kernel ends the server when nobody else can; the next server removes its directory."""
    with run_script("sys.stdin.read()") as script:
        pid, directory = said(script)
        script.kill()

    wait_until(lambda: is_gone(pid))
    assert directory.exists()
    with run_script("") as after:
        said(after)
    assert not directory.exists()


def test_server_outlives_the_thread_that_started_it() -> None:
    """A fixture may start its server in a worker thread."""
    with RedisServer() as server:
        server.kill()
        thread = threading.Thread(target=server.start)
        thread.start()
        thread.join()
        # join() returns a moment before the kernel knows of the end, which is what the
        # death signal waits for.
        wait_until(lambda: is_gone_thread(thread.native_id))

        assert server.ask() is None


def test_exit_of_a_forked_child_leaves_the_server_alone() -> None:
    """Only the process that started a server ends it at exit."""
    with RedisServer() as server:
        directory = server.directory
        child = multiprocessing.get_context("fork").Process(target=_run_exit_handlers)
        child.start()
        child.join(60)

        assert child.exitcode == 0
        assert directory.exists()
        assert server.ask() is None


def _run_exit_handlers() -> None:
    from lockkit_tools.servers import base  # noqa: PLC0415 - what the child runs at exit

    base._close_all()


def test_failing_start_shows_the_log() -> None:
    """The error tells what the server complained about."""
    server = RedisServer(settings={"no-such-setting": "1"})

    with pytest.raises(StartFailed, match="no-such-setting"):
        server.start()

    server.close()


def segments() -> list[str]:
    """The ids of this machine's shared memory segments."""
    lines = subprocess.run(["ipcs", "-m"], check=True, capture_output=True, text=True).stdout
    return [line.split()[1] for line in lines.splitlines() if len(line.split()) > 4]


def test_kill_leaves_no_process_and_no_shared_memory() -> None:
    """PostgreSQL has many processes, and the kernel would keep their memory until the machine restarts."""
    require("postgresql", local=True)
    with PostgresServer() as server:
        pids = [entry.pid for entry in tree(server.pid)]
        segment = (server.data / "postmaster.pid").read_text().splitlines()[6].split()[1]
        assert len(pids) > 2
        assert segment in segments()

        server.kill()

        wait_until(lambda: next((f"{pid} is there" for pid in pids if tree(pid)), None))

    assert segment not in segments()


@pytest.mark.skipif(sys.platform != "linux", reason="registers a handler of glibc's")
def test_programs_of_a_server_are_started_without_fork_handlers() -> None:
    """Those of gRPC start threads in the child, which crash it before it has become the program."""
    require("postgresql", local=True)
    program = (
        "import ctypes\n"
        "from lockkit_tools.servers import PostgresServer\n"
        "with PostgresServer() as server:\n"
        "    libc = ctypes.CDLL(None)\n"
        "    libc.__register_atfork(None, None, ctypes.cast(libc.abort, ctypes.c_void_p), None)\n"
        "    print(server.execute('SELECT 6 * 7'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "42"), done.stderr
