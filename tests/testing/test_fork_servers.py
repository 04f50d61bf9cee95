"""The processes from which workers are forked: what they import, what they leave behind, and that this is nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockkit.testing.fork_servers import ForkServer, ForkServerGone, environment, fork_server
from lockkit.testing.processes import Worker
from lockkit.testing.target import Target
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers._process import process_table
from tests.tries import until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where modules are found that a test writes."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[ForkServer]:
    """Its workers write into the pipe that they have as standard output what `say` gives."""
    (folder / "forked_program.py").write_text(
        textwrap.dedent("""
            import atexit, sys
            def run():
                atexit.register(print, "ended")
                print("begun", *sorted(set(sys.modules) & {"colorsys", "starts_a_thread"}))
                status = sys.stdin.read()
                if status:
                    sys.exit(int(status))
        """)
    )
    server = ForkServer("forked_program:run", (), environment())
    yield server
    server.close()


def run(server: ForkServer, given: str = "") -> tuple[int | None, str]:
    """Start a worker, give it its input, and wait for its end; give status and output."""
    its_input, to_write = os.pipe()
    to_read, its_output = os.pipe()
    with os.fdopen(to_write, "w") as write, os.fdopen(to_read) as read:
        pid = server.fork({0: its_input, 1: its_output})
        os.close(its_input)
        os.close(its_output)
        write.write(given)
        write.close()
        return server.reap(pid, PATIENCE), read.read()


def test_modules_are_imported_once_for_the_workers_after(server: ForkServer) -> None:
    """What cannot be imported does no harm."""
    server.load(["colorsys", "no_such_module"])

    assert not server.spoilt
    assert run(server) == (0, "begun colorsys\nended\n")


def test_import_that_starts_a_thread_is_not_forked(folder: Path) -> None:
    """A fork would be a copy of half a program: the next worker imports for itself."""
    (folder / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (folder / "plain_program.py").write_text("def run():\n    pass\n")
    first = fork_server("plain_program:run", (), environment())
    first.load(["starts_a_thread"])
    assert first.spoilt

    second = fork_server("plain_program:run", (), environment())
    second.load(["starts_a_thread"])

    assert second is not first
    assert not second.spoilt
    assert fork_server("plain_program:run", (), environment()) is second
    first.close()
    second.close()


def test_dead_server_is_an_error(server: ForkServer) -> None:
    """Not an endless wait."""
    server._process.kill()

    with pytest.raises(ForkServerGone):
        server.fork({1: 1})
    assert not server.alive


def test_server_is_shared_while_it_obeys(folder: Path) -> None:
    """A thread that wants the server gets it although another one waits for an answer: one that obeys is alive."""
    (folder / "patient_program.py").write_text("import time\ndef run():\n    time.sleep(1000)\n")
    server = fork_server("patient_program:run", (), environment())
    pid = server.fork({1: 1})
    waiting = threading.Thread(target=server.reap, args=(pid,))
    waiting.start()
    until(server._lock.locked)

    assert server.alive
    assert fork_server("patient_program:run", (), environment()) is server
    os.kill(pid, signal.SIGKILL)
    waiting.join()
    server.close()


def test_nothing_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    """Killed with SIGKILL, while a worker stands still: fork server and worker end too."""
    program = f"""
        import sys
        from lockkit.testing.processes import Worker
        from lockkit.testing.target import Target
        worker = Worker(Target("file:{tmp_path}/locks"), "blocking")
        worker.stop()
        print(worker.pid, worker._server._process.pid, flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True
    ) as process:
        assert process.stdout is not None
        pids = {int(pid) for pid in process.stdout.readline().split()}
        assert len(pids) == 2
        process.kill()
    until(lambda: not pids & {entry.pid for entry in process_table() if entry.state[:1] != "Z"})


def test_worker_has_the_environment_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is when the worker is started, not when the one before it was."""
    for name in ("one", "two"):
        monkeypatch.setenv("LOCKKIT_STATE_DIR", str(tmp_path / name))
        with Worker(Target("file:"), "blocking") as worker:
            worker.acquire("x")
        assert (tmp_path / name).is_dir()
