"""FastAPI on uvicorn with two workers: locked endpoints, one leader, idempotency keys, clients that go away."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import httpx2 as httpx
import pytest

import lockkit
from lockkit_tools.servers._ports import Ports
from tests.cli.support import PATIENCE, ROOT, Cli, alive, children
from tests.tries import until

WORKERS = 2


class Server:
    """
    uvicorn with its workers.

    Attributes:
        home: Where the application says what it does.
        url: Of the application.
        locks: URL of the backend, without the faults that `fault` makes.
        process: uvicorn's first process.
    """

    def __init__(self, cli: Cli, port: int) -> None:
        self.home = cli.home
        self.url = f"http://127.0.0.1:{port}"
        self.locks = f"file:{cli.home}/locks"
        self._pool = ThreadPoolExecutor(32)
        log = (cli.home / "log").open("w")
        with log:
            self.process = cli.start_program(
                *(sys.executable, "-m", "uvicorn", "tests.integrations.fastapi_app:app"),
                *("--port", str(port), "--workers", str(WORKERS), "--timeout-graceful-shutdown", "20"),
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=cli.env
                | {"SEATS_HOME": str(cli.home), "SEATS_URL": f"faulty:{cli.home}/locks", "PYTHONWARNINGS": ""},
            )

    def ask(self, path: str, method: str = "POST", **keywords: Any) -> httpx.Response:
        """Send a request on a connection of its own."""
        return httpx.request(method, f"{self.url}{path}", timeout=PATIENCE, **keywords)

    def begin(self, path: str, **keywords: Any) -> Future[httpx.Response]:
        """Send one, and do not wait for the answer."""
        return self._pool.submit(self.ask, path, **keywords)

    def lines(self, file: str) -> list[str]:
        """Return the whole lines that the application has written to a file."""
        path = self.home / file
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def wait_for(self, file: str, count: int) -> list[str]:
        """Wait until it has written so many."""
        until(lambda: len(self.lines(file)) >= count)
        return self.lines(file)

    def open(self, gate: str) -> None:
        """Let requests pass."""
        (self.home / f"{gate}.open").touch()

    def connect(self) -> closing[socket.socket]:
        """Connect as a client that can go away at any time."""
        return closing(socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2]))))

    def waiters(self, seat: int) -> list[int | None]:
        """How many wait for a seat, a number for each holder."""
        return list(self.ask(f"/waiters/{seat}", "GET").json())

    @contextmanager
    def fault(self, what: str) -> Iterator[None]:
        """Have the backend answer no requests of a kind."""
        path = self.home / f"locks.{what}"
        path.touch()
        try:
            yield
        finally:
            path.unlink()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start it once."""
    cli = Cli(tmp_path_factory.mktemp("uvicorn"))
    ports = Ports()
    served = Server(cli, ports.reserve())
    served.wait_for("startups", WORKERS)
    yield served
    workers = children(served.process.pid)
    served.process.terminate()
    try:
        assert served.process.wait(PATIENCE) in {0, -signal.SIGTERM}
    finally:
        for worker in workers:
            if alive(worker):
                os.kill(worker, signal.SIGKILL)
        cli.close()


def test_second_request_for_a_seat_gets_409_whichever_worker_it_meets(server: Server) -> None:
    """However the number is written; other seats are free, and the seat is when it was answered."""
    first = server.begin("/seats/7?at=busy")
    server.wait_for("busy.reached", 1)

    refused = [server.ask(f"/seats/{seat}?at=none") for seat in ("7", "07", "7") for _ in range(3)]
    server.open("other")
    other = server.ask("/seats/8?at=other")
    server.open("busy")
    booked = first.result(PATIENCE)
    again = server.ask("/seats/7?at=busy")

    assert {answer.status_code for answer in refused} == {409}
    assert refused[0].headers["retry-after"] == "1"
    assert refused[0].json() == {"detail": "busy"}
    assert [other.status_code, booked.status_code, again.status_code] == [200, 200, 200]
    assert again.json()["token"] > booked.json()["token"]


def test_outage_is_503(server: Server) -> None:
    """With Retry-After; the endpoint does not run."""
    with server.fault("acquire"):
        answer = server.ask("/seats/10?at=none")

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "10" not in server.lines("booked")


@pytest.mark.parametrize(("path", "finishes"), [("seats", False), ("thread", True)])
def test_response_is_no_success_if_the_lock_was_lost(server: Server, path: str, *, finishes: bool) -> None:
    """A coroutine is cancelled at once; a thread goes on to its end."""
    seat = 20 + finishes
    before = server.lines("booked").count(str(seat))
    request = server.begin(f"/{path}/{seat}?at=lost-{path}")
    server.wait_for(f"lost-{path}.reached", 1)

    with lockkit.connect(server.locks) as client:
        assert client.break_lock(f"seat:{seat}")
        if finishes:
            server.open(f"lost-{path}")
        answer = request.result(PATIENCE)

    assert answer.status_code == 500
    assert answer.json() == {"detail": "the lock was lost: the outcome is unknown"}
    assert server.lines("booked").count(str(seat)) - before == finishes


def test_client_that_goes_away_while_it_waits_leaves_no_waiter(server: Server) -> None:
    """Its request gives up its place, and never runs."""
    first = server.begin("/seats/30?at=gone")
    server.wait_for("gone.reached", 1)
    with server.connect() as client:
        client.sendall(b"POST /waiting/30 HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
        until(lambda: server.waiters(30) == [1])

    until(lambda: server.waiters(30) == [0])
    server.open("gone")

    assert first.result(PATIENCE).status_code == 200
    with lockkit.connect(server.locks) as locks, locks.lock("seat:30", timeout=PATIENCE):
        assert "30" not in server.lines("waited")


def test_client_that_goes_away_later_changes_nothing(server: Server) -> None:
    """The endpoint runs to its end under its lock, and frees it."""
    with server.connect() as client:
        client.sendall(b"POST /seats/31?at=left HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
        server.wait_for("left.reached", 1)
    refused = server.ask("/seats/31?at=none")
    waiting = server.begin("/waiting/31")
    until(lambda: server.waiters(31) == [1])

    server.open("left")

    assert refused.status_code == 409
    assert waiting.result(PATIENCE).status_code == 200
    assert "31" in server.lines("booked")


def test_lock_of_asyncio_excludes_nobody_in_another_worker(server: Server) -> None:
    """The usual way: two requests are inside at the same time, each in a process of its own."""
    first = server.begin("/alone?at=alone")
    server.wait_for("alone.reached", 1)
    second = server.begin("/alone?at=alone")
    inside = server.wait_for("alone.reached", 2)
    server.open("alone")

    assert len(set(inside)) == 2
    for request in (first, second):
        assert request.result(PATIENCE).status_code == 200


def test_startup_runs_in_each_worker_and_the_leader_s_work_in_one(server: Server) -> None:
    """The usual way, and `leading`; when the leader is killed, another worker leads."""
    server.wait_for("leaders", 1)
    startups = server.lines("startups")
    assert len(set(startups)) >= WORKERS
    (leading,) = set(leaders := server.lines("leaders")) - set(server.lines("stopped"))
    pid, _, first = leading.partition(" ")

    os.kill(int(pid), signal.SIGKILL)
    other, _, second = server.wait_for("leaders", len(leaders) + 1)[-1].partition(" ")

    assert other != pid
    assert int(second) > int(first)
    server.wait_for("startups", len(startups) + 1)  # for whatever test comes next


def test_leader_s_work_is_cancelled_when_the_term_is_lost(server: Server) -> None:
    """And the next term has a leader, this worker or another."""
    before = len(server.wait_for("leaders", 1))
    leading = server.lines("leaders")[-1]

    with lockkit.connect(server.locks) as client:
        assert client.break_lock("planner")
        server.wait_for("leaders", before + 1)

    until(lambda: leading in server.lines("stopped"))


def key(name: str, *, caller: str = "Ada") -> dict[str, str]:
    """The headers of a request with a key."""
    return {"Idempotency-Key": f'"{name}"', "Authorization": caller}


def test_repeat_with_the_same_key_gets_the_stored_response(server: Server) -> None:
    """From any worker, quoted or not; without the work, and without its cookie."""
    first = server.ask("/payments", json={"amount": 17}, headers=key("a"))
    repeats = [server.ask("/payments", json={"amount": 17}, headers=key("a")) for _ in range(6)]
    unquoted = server.ask("/payments", json={"amount": 17}, headers=key("a") | {"Idempotency-Key": "a"})

    assert (first.status_code, first.text, first.headers["location"]) == (201, "paid 17", "/payments/17")
    assert "idempotent-replayed" not in first.headers
    for repeat in (*repeats, unquoted):
        assert (repeat.status_code, repeat.text, repeat.headers["location"]) == (201, "paid 17", "/payments/17")
        assert repeat.headers["idempotent-replayed"] == "true"
        assert "set-cookie" not in repeat.headers
    assert server.lines("payments").count("17") == 1
    until(lambda: "17" in server.lines("receipts"))  # others may have been written before
    assert server.lines("receipts").count("17") == 1


@pytest.mark.parametrize(("path", "amount"), [("/payments", 20), ("/payments?status=200", 19)])
def test_key_used_for_another_request_is_422(server: Server, path: str, amount: int) -> None:
    """Another body, or another address."""
    name = f"c{amount}"
    server.ask("/payments", json={"amount": 19}, headers=key(name))

    answer = server.ask(path, json={"amount": amount}, headers=key(name))

    assert answer.status_code == 422
    assert answer.json() == {"detail": "this key was used for another request"}
    assert "20" not in server.lines("payments")


def test_repeat_while_the_first_request_runs_is_409(server: Server) -> None:
    """With Retry-After; also if the first client has gone, whose response is stored in the end."""
    body = json.dumps({"amount": 21})
    with server.connect() as client:
        client.sendall(
            b"POST /payments?at=paying HTTP/1.1\r\nHost: h\r\nIdempotency-Key: d\r\nAuthorization: Ada\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body.encode())
        )
        server.wait_for("paying.reached", 1)

    def repeat() -> httpx.Response:
        headers = key("d") | {"Content-Type": "application/json"}
        return server.ask("/payments?at=paying", content=body, headers=headers)

    running = repeat()
    server.open("paying")
    until(lambda: repeat().status_code == 201)

    assert running.status_code == 409
    assert running.headers["retry-after"] == "1"
    assert repeat().headers["idempotent-replayed"] == "true"
    assert server.lines("payments").count("21") == 1


def test_response_that_is_too_large_to_store_is_done_all_the_same(server: Server) -> None:
    """The first client gets it; repeats are told that it was done."""
    first = server.ask("/payments", json={"amount": 30_000}, headers=key("f"))
    repeat = server.ask("/payments", json={"amount": 30_000}, headers=key("f"))

    assert first.status_code == 201
    assert first.text == "\xe9\x00" * 30_000
    assert repeat.status_code == 409
    assert "retry-after" not in repeat.headers
    assert server.lines("payments").count("30000") == 1


def test_outage_with_a_key_is_503_and_runs_nothing(server: Server) -> None:
    """Without a record nothing would keep a repeat from running."""
    with server.fault("acquire"):
        answer = server.ask("/payments", json={"amount": 23}, headers=key("g"))

    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "23" not in server.lines("payments")
