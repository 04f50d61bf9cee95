"""Starlette and FastAPI in this process: how names are filled in, what endpoints get, and what goes wrong."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from datetime import timedelta
from enum import Enum
from pathlib import Path as FilePath
from typing import Annotated, Any

import pytest
from fastapi import BackgroundTasks, Body, Cookie, Depends, FastAPI, Header, Path, Query, WebSocket
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import ASGIApp

import lockkit.aio
from lockkit.backend import apart
from lockkit.integrations.fastapi import Client, IdempotencyMiddleware, Lease, lifespan
from lockkit.integrations.fastapi import client as client_dependency
from lockkit.integrations.fastapi import locked as locked_dependency
from lockkit.integrations.idempotency import _digest
from lockkit.integrations.starlette import client_of, filled, hold, lead, locked, name_fields
from lockkit.testing.kit.clients import AioKitClient
from lockkit.testing.timing import PATIENCE


@locked("seat:{hall}:{seat}", ttl=10)
async def book(request: Request) -> JSONResponse:
    """Tell the name of the lock."""
    return JSONResponse(request.state.lease.name)


async def report(request: Request) -> JSONResponse:
    """Hold a lock within the endpoint."""
    async with hold(request, "report") as lease:
        return JSONResponse(lease.name)


@locked("labelled", label="by hand")
async def labelled(request: Request) -> JSONResponse:
    """Tell the name of the lock."""
    return JSONResponse(request.state.lease.name)


@locked("upload", timeout=60)
async def upload(request: Request) -> JSONResponse:
    """Tell how long the body is."""
    return JSONResponse(len(await request.body()))


@pytest.fixture
def starlette() -> Iterator[TestClient]:
    """An application on locks of its own."""
    app = Starlette(
        routes=[
            Route("/seats/{hall}/{seat:int}", book, methods=["POST"]),
            Route("/seats/{hall}", book, methods=["POST"]),
            Route("/report", report),
            Route("/labelled", labelled),
        ],
        lifespan=lifespan(f"memory://{secrets.token_hex(4)}"),
    )
    with TestClient(app) as client:
        yield client


def test_endpoint_of_starlette_has_its_lease(starlette: TestClient) -> None:
    """Path and query parameters fill the name; a value cannot imitate another one."""
    assert starlette.post("/seats/A/07").json() == "seat:A:7"
    assert starlette.post("/seats/A?seat=B:7").json() == "seat:A:B%3A7"
    assert starlette.post("/seats/A%3AB/7").json() == "seat:A%3AB:7"
    assert starlette.get("/report").json() == "report"


@pytest.mark.asyncio
async def test_endpoint_that_waits_gets_the_whole_body() -> None:
    """Also if the lock gets free while the second half is on its way."""
    halves = [b"first", b"second"]
    length: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if len(halves) == 1:
            await lease.release()
            await asyncio.sleep(0.05)
        return {"type": "http.request", "body": halves.pop(0), "more_body": bool(halves)}

    async def send(message: MutableMapping[str, Any]) -> None:
        length.append(message.get("body", b""))

    async with lockkit.aio.connect("memory://upload") as client:
        lease = await client.lock("upload").acquire(0)
        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
        await Starlette(routes=[Route("/", upload, methods=["POST"])])(
            {**scope, "state": {"lockkit": client}}, receive, send
        )

    assert b"".join(length) == b"11"


@pytest.mark.parametrize(
    ("configured", "whom"),
    [("memory://narrow", "threads and tasks of this process"), (None, "processes of this machine")],
)
def test_locks_that_other_machines_do_not_see_are_warned_of(
    configured: str | None,
    whom: str,
    *,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: FilePath,
) -> None:
    """Unless the application gives their URL itself, then it knows; or it is being developed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCKKIT_URL", raising=False)
    if configured is not None:
        monkeypatch.setenv("LOCKKIT_URL", configured)

    with TestClient(FastAPI(lifespan=lifespan(configured or "file:"))):
        assert not caplog.records
    with TestClient(FastAPI(lifespan=lifespan(), debug=True)):
        assert not caplog.records
    with TestClient(Starlette(lifespan=lifespan())):
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    assert f"which locks out {whom} only: if workers run elsewhere too, set the URL" in caplog.text


def test_missing_or_too_long_parameter_is_422(starlette: TestClient) -> None:
    """It is the client's fault."""
    assert starlette.post("/seats/A").status_code == 422
    assert starlette.post(f"/seats/{'A' * 250}/7").status_code == 422


@pytest.mark.parametrize("module", ["starlette", "fastapi"])
@pytest.mark.parametrize("name", ["", "x" * 256, "é" * 128, "a\0b", "\ud800"])
def test_name_of_a_request_that_no_lock_can_have_is_422(module: str, name: str) -> None:
    """The client has chosen it, so it is no 500."""
    state = lifespan(f"memory://{secrets.token_hex(4)}")
    ran: list[int] = []

    async def held(request: Request) -> PlainTextResponse:
        async with hold(request, (await request.json())["name"]):
            ran.append(1)
        return PlainTextResponse("")

    def named(order: Annotated[dict[str, Any], Body()]) -> str:
        return str(order["name"])

    async def depends() -> None:
        ran.append(1)

    app: Starlette = Starlette(routes=[Route("/", held, methods=["POST"])], lifespan=state)
    if module == "fastapi":
        app = FastAPI(lifespan=state)
        app.post("/", dependencies=[locked_dependency(named)])(depends)
    with TestClient(app, headers={"Content-Type": "application/json"}) as browser:
        answer = browser.post("/", content=json.dumps({"name": name}))
        assert (answer.status_code, ran) == (422, [])
        assert "a parameter is empty, too long" in answer.text
        assert browser.post("/", content=json.dumps({"name": "é" * 127})).status_code == 200


@pytest.mark.parametrize(
    "template",
    [
        *("seat:{", "seat:{seat.number}", "seat:{seat!r}", "seat:{seat:03}", "seat:{}"),
        *("", "seat:\0{seat}", "\xe9" * 200, 7),
    ],
)
def test_template_that_cannot_be_a_name_is_refused(template: Any) -> None:  # noqa: ANN401 - also no text
    """At once, and not with the first request."""
    with pytest.raises(lockkit.ConfigurationError):
        locked_dependency(template)
    with pytest.raises(lockkit.ConfigurationError):
        locked(template)


def test_function_that_is_no_coroutine_function_is_refused() -> None:
    """Starlette would run it in a thread."""
    with pytest.raises(lockkit.ConfigurationError, match="async def"):
        locked("a")(lambda _request: None)  # type: ignore[arg-type,return-value]


def test_endpoint_of_a_web_socket_is_told_that_it_gets_no_lock() -> None:
    """It was a RuntimeError: coroutine raised StopIteration."""

    @locked("a")
    async def chat(_: WebSocket) -> None:
        """Never run."""

    app = Starlette(routes=[WebSocketRoute("/", chat)], lifespan=lifespan(f"memory://{secrets.token_hex(4)}"))
    with (
        TestClient(app) as browser,
        pytest.raises(lockkit.ConfigurationError, match=r"chat\(\) got none: in a WebSocket"),
        browser.websocket_connect("/"),
    ):
        pass


@pytest.mark.parametrize(("after", "header"), [(0.2, "1"), (timedelta(minutes=1.5), "90")])
def test_client_is_asked_to_wait_for_whole_seconds(after: Any, header: str) -> None:  # noqa: ANN401 - both
    """HTTP has no others."""

    @locked("a", timeout=0, retry_after=after)
    async def nested(request: Request) -> JSONResponse:
        async with hold(request, "a", retry_after=after):
            pytest.fail("two held it")

    app = Starlette(routes=[Route("/", nested)], lifespan=lifespan(f"memory://{secrets.token_hex(4)}"))
    with TestClient(app) as browser:
        answer = browser.get("/")
    assert (answer.status_code, answer.headers["retry-after"]) == (409, header)


def test_options_of_the_lock_may_be_given(starlette: TestClient) -> None:
    """Also the label, which is the template otherwise."""

    class Labels(lockkit.Observer):
        def __init__(self) -> None:
            self.seen: list[str | None] = []

        def granted(self, event: lockkit.LockEvent, /) -> None:
            self.seen.append(event.label)

    labels = Labels()
    lockkit.add_observer(labels)
    try:
        assert starlette.get("/labelled").json() == "labelled"
        assert starlette.post("/seats/A/7").json() == "seat:A:7"
    finally:
        lockkit.remove_observer(labels)
    assert labels.seen == ["by hand", "seat:{hall}:{seat}"]


def test_literal_braces_stay() -> None:
    """As in format strings."""
    assert filled(name_fields("{{a}}:{a}"), {"a": "{b}"}) == "{a}:%7Bb%7D"


def test_values_of_a_request_never_imitate_each_other() -> None:
    """Also where the text between them is one of the characters that URLs leave as they are."""
    seat = name_fields("seat:{hall}-{seat}")
    assert filled(seat, {"hall": "a-b", "seat": "c"}) != filled(seat, {"hall": "a", "seat": "b-c"})
    assert filled(seat, {"hall": "a.b~", "seat": 7}) == "seat:a.b~-7"
    with pytest.raises(lockkit.ConfigurationError, match="different values would give the same name"):
        name_fields("{hall}{seat}")


def test_application_without_lifespan_says_so() -> None:
    """Also one whose test client did not run it."""
    app = FastAPI(lifespan=lifespan("memory://"))
    app.get("/", dependencies=[locked_dependency("a")])(lambda: None)

    with pytest.raises(lockkit.ConfigurationError, match="context manager"):
        TestClient(app).get("/")
    with pytest.raises(lockkit.ConfigurationError, match="lifespan"):
        client_of({"type": "http"})


class Hall(Enum):
    """A parameter with few values."""

    GREAT = "great"


SeatLease = Annotated[Lease, locked_dependency("seat:{seat}")]


def seat_of(seat: int, row: Annotated[int, Query(alias="r")] = 1) -> tuple[int, int]:
    """A seat that exists."""
    return seat, row


def ticket_of(seat: Annotated[tuple[int, int], Depends(seat_of)]) -> tuple[int, int]:
    """A ticket for a seat."""
    return seat


class Place:
    """A dependency that is a class."""

    def __init__(self, seat: Annotated[int, Query()]) -> None:
        self.seat = seat


class Chair(BaseModel):
    """Query parameters that are a model."""

    seat: int


def order_name(order: Annotated[int, Body(embed=True)]) -> str:
    """Name a lock after something in the body."""
    return f"order:{order}"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("/typed/great/7", "a:great:7:1:x"),
        ("/typed/great/007?page=01", "a:great:7:1:x"),
        ("/typed/great/7?page=2&word=%C3%A4/", "a:great:7:2:%C3%A4%2F"),
    ],
)
def test_names_are_made_of_what_the_endpoint_gets(url: str, name: str) -> None:
    """Two ways to write a value are one lock."""
    app = FastAPI(lifespan=lifespan("memory://"))

    @app.get("/typed/{hall}/{seat}")
    def typed(
        hall: Hall,
        seat: Annotated[int, Path(gt=0)],
        lease: Annotated[Lease, locked_dependency("a:{hall}:{seat}:{page}:{word}")],
        word: Annotated[str, Query()] = "x",
        page: int = Query(1),  # noqa: FAST002 - this form too
    ) -> list[Any]:
        return [lease.name, hall, seat, page, word]

    with TestClient(app) as client:
        assert client.get(url).json()[0] == name
        assert client.get("/typed/great/0").status_code == 422
        assert client.get("/typed/small/1").status_code == 422


def test_names_are_made_of_what_a_dependency_of_the_endpoint_gets() -> None:
    """If only that declares the parameter: two ways to write a seat were two locks."""
    app = FastAPI(lifespan=lifespan("memory://"))

    @app.get("/seats/{seat}")
    def book(
        lease: Annotated[Lease, locked_dependency("{hall}:{row}:{seat}")],
        ticket: Annotated[tuple[int, int], Depends(ticket_of)],
    ) -> list[Any]:
        return [lease.name, ticket]

    @app.get("/places")
    def stand(lease: Annotated[Lease, locked_dependency("{seat}")], place: Annotated[Place, Depends()]) -> list[Any]:
        return [lease.name, place.seat]

    with TestClient(app) as client:
        assert client.get("/places?seat=07").json() == ["7", 7]
        assert client.get("/seats/007?r=02&hall=03&row=4").json() == ["03:2:7", [7, 2]]
        assert client.get("/seats/7?hall=3").json() == ["3:1:7", [7, 1]]
        assert client.get("/seats/x?hall=3").status_code == 422


def test_default_is_the_one_that_the_endpoint_gets() -> None:
    """A default of few values is the same lock as that value in the request; a factory makes each request's own."""
    app = FastAPI(lifespan=lifespan("memory://"))
    today = ["monday"]
    query = Query(default_factory=lambda: today[0])

    @app.get("/hall")
    def hall(lease: Annotated[Lease, locked_dependency("hall:{hall}")], hall: Hall = Hall.GREAT) -> list[Any]:
        return [lease.name, hall]

    @app.get("/day")
    def day(lease: Annotated[Lease, locked_dependency("day:{day}")], day: str = query) -> list[Any]:
        return [lease.name, day]

    with TestClient(app) as client:
        assert client.get("/hall").json() == client.get("/hall?hall=great").json() == ["hall:great", "great"]
        assert client.get("/day").json() == ["day:monday", "monday"]
        today[0] = "tuesday"
        assert client.get("/day").json() == ["day:tuesday", "tuesday"]


def test_parameter_has_the_name_by_which_the_request_gives_it() -> None:
    """FastAPI ignores one of the parameter's own name, so that must not choose the lock."""
    app = FastAPI(lifespan=lifespan("memory://"))

    @app.get("/annotated")
    def annotated(lease: SeatLease, seat: Annotated[int, Query(alias="seat-id")] = 0) -> list[Any]:
        return [lease.name, seat]

    @app.get("/default")
    def default(lease: SeatLease, seat: int = Query(0, alias="seat-id")) -> list[Any]:  # noqa: FAST002 - this form too
        return [lease.name, seat]

    @app.get("/required")
    def required(lease: SeatLease, seat: Annotated[int, Query(alias="seat-id")]) -> list[Any]:
        return [lease.name, seat]

    with TestClient(app) as client:
        for path in ("/annotated", "/default", "/required"):
            assert client.get(f"{path}?seat-id=07&seat=8").json() == ["seat:7", 7]
        assert client.get("/annotated?seat=8").json() == client.get("/default?seat=8").json() == ["seat:0", 0]
        assert client.get("/required?seat=8").status_code == 422


@pytest.mark.parametrize("source", [Header("x"), Cookie("x"), Body("x", embed=True), Depends(lambda: "acme")])
def test_parameter_from_elsewhere_is_refused(source: Any) -> None:  # noqa: ANN401 - no common class
    """A query parameter of that name would choose the lock, and FastAPI ignores that."""
    app = FastAPI(lifespan=lifespan("memory://"))

    @app.post("/")
    def report(lease: Annotated[Lease, locked_dependency("report:{tenant}")], tenant: str = source) -> None:
        raise AssertionError(lease.name, tenant)

    with TestClient(app) as client, pytest.raises(lockkit.ConfigurationError, match="dependency that returns the name"):
        client.post("/?tenant=other", headers={"tenant": "acme"}, json={"tenant": "acme"})


@pytest.mark.parametrize("below", [False, True])
def test_parameter_in_a_model_is_refused(*, below: bool) -> None:
    """Its text in the request named the lock, so two ways to write a seat were two locks."""
    app = FastAPI(lifespan=lifespan("memory://"))

    def book(chair: Annotated[Chair, Query()]) -> None:
        raise AssertionError(chair)

    needed = [Depends(book)] if below else []
    app.get("/", dependencies=[locked_dependency("seat:{seat}"), *needed])((lambda: None) if below else book)

    with TestClient(app) as client, pytest.raises(lockkit.ConfigurationError, match="dependency that returns the name"):
        client.get("/?seat=07")


def test_name_may_come_from_a_dependency() -> None:
    """For example from the body, which FastAPI has validated."""
    app = FastAPI(lifespan=lifespan("memory://"))

    @app.post("/orders")
    def ship(lease: Annotated[Lease, locked_dependency(order_name)]) -> str:
        return lease.name

    with TestClient(app) as client:
        assert client.post("/orders", json={"order": "12"}).json() == "order:12"
        assert client.post("/orders", json={"order": "x"}).status_code == 422


def test_parameter_that_is_not_there_is_422() -> None:
    """The endpoint has no default for it."""
    app = FastAPI(lifespan=lifespan("memory://"))
    app.get("/", dependencies=[locked_dependency("a:{b}")])(lambda: None)

    with TestClient(app) as client:
        assert client.get("/").status_code == 422
        assert client.get("/?b=1").status_code == 200


def test_background_task_can_acquire_the_lock() -> None:
    """It runs after the response, and so without it."""
    app = FastAPI(lifespan=lifespan("memory://"))
    acquired: list[bool] = []

    @app.post("/", dependencies=[locked_dependency("a")])
    async def book(request: Request, tasks: BackgroundTasks) -> None:
        async def acquire() -> None:
            async with client_of(request.scope).lock("a").attempt() as lease:
                acquired.append(lease is not None)

        tasks.add_task(acquire)

    with TestClient(app) as client:
        assert client.post("/").status_code == 200
    assert acquired == [True]


def test_error_of_the_endpoint_goes_on_unchanged() -> None:
    """And frees the lock."""
    app = FastAPI(lifespan=lifespan("memory://"))

    @app.post("/", dependencies=[locked_dependency("a")])
    async def fail() -> None:
        raise LookupError

    with TestClient(app) as client:
        for _ in range(2):
            with pytest.raises(LookupError):
                client.post("/")


@pytest.mark.parametrize(("scope", "first", "locked"), [
    ("function", "lease", True), ("function", "session", False), (None, "lease", False),
])  # fmt: skip
def test_session_that_a_dependency_commits(scope: Any, first: str, *, locked: bool) -> None:  # noqa: ANN401 - a literal
    """Under the lock only if the dependency ends before the response is sent, and begins after the lease."""
    app = FastAPI(lifespan=lifespan("memory://"))
    commits: list[bool] = []

    async def session(client: Annotated[Client, Depends(client_dependency)]) -> AsyncIterator[None]:
        yield
        commits.append(await client.lock("seat:7").locked())

    lease, given = locked_dependency("seat:{seat}"), Depends(session, scope=scope)
    app.post("/{seat}", dependencies=[lease, given] if first == "lease" else [given, lease])(lambda: None)
    with TestClient(app) as browser:
        assert browser.post("/7").status_code == 200
    assert commits == [locked]


@pytest.mark.parametrize("kind", ["async def", "def"])
def test_endpoint_that_yields_is_refused(kind: str) -> None:
    """FastAPI runs it when the dependencies have ended, and so without the lock."""
    app = FastAPI(lifespan=lifespan(f"memory://{secrets.token_hex(4)}"))
    ran: list[int] = []

    async def seats() -> AsyncIterator[int]:
        ran.append(1)
        yield 1

    def seats_in_thread() -> Iterator[int]:
        ran.append(1)
        yield 1

    endpoint = seats if kind == "async def" else seats_in_thread
    app.get("/", dependencies=[locked_dependency("seats")])(endpoint)

    with TestClient(app) as browser, pytest.raises(lockkit.ConfigurationError, match="yields its response"):
        browser.get("/")
    assert ran == []


@pytest.mark.parametrize("name", ["seat:{seat}", lambda: "seat:1"])
def test_web_socket_gets_the_client_and_no_lock(name: str | Callable[[], str]) -> None:
    """A lock of the dependency would answer with a status, which a WebSocket does not have."""
    app = FastAPI(lifespan=lifespan(f"memory://{secrets.token_hex(4)}"))

    @app.websocket("/locked/{seat}", dependencies=[locked_dependency(name)])
    async def refused(socket: WebSocket) -> None:
        await socket.accept()

    @app.websocket("/{seat}")
    async def served(socket: WebSocket, seat: int, client: Annotated[Client, Depends(client_dependency)]) -> None:
        await socket.accept()
        async with client.lock(f"seat:{seat}") as lease:
            await socket.send_text(lease.name)
        await socket.close()

    with TestClient(app) as browser:
        with browser.websocket_connect("/1") as socket:
            assert socket.receive_text() == "seat:1"
        message = r"cannot lock a WebSocket.*use client.lock\('seat:1'\)"
        with pytest.raises(lockkit.ConfigurationError, match=message), browser.websocket_connect("/locked/1"):
            pass


@pytest.mark.parametrize(("scope", "statuses"), [(None, [200, 200]), ("function", [500, 500])])
def test_response_is_stored_before_a_session_commits(scope: Any, statuses: list[int]) -> None:  # noqa: ANN401 - a literal
    """Unless its dependency ends before the response: that commit has failed, and the repeat gets the response."""
    app = FastAPI(lifespan=lifespan(f"memory://{secrets.token_hex(4)}"))
    app.add_middleware(IdempotencyMiddleware, caller=lambda _request: "ada")

    def session() -> Iterator[None]:
        yield
        raise LookupError

    app.post("/", dependencies=[Depends(session, scope=scope)])(lambda: None)
    with TestClient(app, raise_server_exceptions=False) as client:
        assert [client.post("/", headers={"Idempotency-Key": "k"}).status_code for _ in range(2)] == statuses


def payments(**options: Any) -> Starlette:
    """An application that counts its runs."""
    options = {"caller": lambda _request: "ada", **options}
    runs: list[bytes] = []

    async def pay(request: Request) -> PlainTextResponse:
        runs.append(await request.body())
        return PlainTextResponse(str(len(runs)))

    return Starlette(
        routes=[Route("/", pay, methods=["GET", "POST", "PUT"])],
        middleware=[Middleware(IdempotencyMiddleware, **options)],
        lifespan=lifespan(f"memory://{secrets.token_hex(4)}"),
    )


def test_key_may_be_required() -> None:
    """Then a request without one is refused; other methods need none."""
    with TestClient(payments(required=True, methods={"PUT"})) as client:
        assert client.put("/").status_code == 400
        assert client.put("/", headers={"Idempotency-Key": '""'}).status_code == 400
        assert client.post("/").text == "1"
        assert client.put("/", content=b"x", headers={"Idempotency-Key": "k"}).text == "2"
        assert client.put("/", content=b"x", headers={"Idempotency-Key": "k"}).text == "2"
        assert client.post("/", headers={"Idempotency-Key": "k"}).text == "3"


@pytest.mark.parametrize(
    "options",
    [
        {"methods": "POST"}, {"keep": 0}, {"keep": "1d"}, {"retry_after": "1"}, {"max_body": "1 MiB"}, {"max_body": -1},
        {"max_response": 64 * 1024 + 1},
    ],
)  # fmt: skip
def test_wrong_options_are_refused_before_the_first_request(options: dict[str, Any]) -> None:
    """With methods="POST" no request would have been recognised as a repeat."""
    with pytest.raises(lockkit.ConfigurationError, match=f"^{next(iter(options))} "):
        IdempotencyMiddleware(payments(), caller=lambda _request: "ada", **options)


def test_caller_is_a_plain_function_that_returns_a_str() -> None:
    """Or None, for nobody."""

    async def ask(_request: Request) -> str:
        return ""

    with pytest.raises(lockkit.ConfigurationError, match=r"^caller must be a plain function"):
        IdempotencyMiddleware(payments(), caller=ask)  # type: ignore[arg-type] # wrong on purpose
    with (
        TestClient(payments(caller=lambda _request: 17)) as client,
        pytest.raises(lockkit.ConfigurationError, match="must return a str or None, not int"),
    ):
        client.post("/", headers={"Idempotency-Key": "k"})


@pytest.mark.parametrize("nobody", ["", None])
def test_key_of_nobody_is_not_everybody_s(nobody: str | None) -> None:
    """All requests without the header got the stored response of one of them."""

    def caller(request: Request) -> str | None:
        return (user := request.headers.get("authorization", nobody)) and f"{request.url.hostname} {user}"

    with TestClient(payments(caller=caller)) as client:
        assert [client.post("/", headers={"Idempotency-Key": "k"}).text for _ in range(2)] == ["1", "2"]
        users = [{"Idempotency-Key": "k", "Authorization": user} for user in ("ada", "bob", "ada")]
        assert [client.post("/", headers=headers).text for headers in users] == ["3", "4", "3"]
    with TestClient(payments(caller=caller, required=True)) as client:
        refused = client.post("/", headers={"Idempotency-Key": "k"})
        assert (refused.status_code, "needs a caller" in refused.text) == (400, True)


def keyed(endpoint: Any, **options: Any) -> IdempotencyMiddleware:  # noqa: ANN401 - any that Starlette takes
    """An endpoint behind the middleware, which knows one caller."""
    app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
    return IdempotencyMiddleware(app, caller=lambda _request: "ada", **options)


Messages = list[dict[str, Any]]


async def ask(app: ASGIApp, client: lockkit.aio.Client, requests: Messages, sent: Messages, **headers: str) -> None:
    """Call an application as a server does, whose client sends these messages and then leaves, when it has got one."""
    left = asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        if requests:
            return requests.pop(0)
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(dict(message))
        if message.get("body"):
            left.set()

    if headers.pop("gone", None):
        left.set()
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": raw}
    await app({**scope, "state": {"lockkit": client}}, receive, send)


@pytest.mark.asyncio
@pytest.mark.parametrize("length", [{"content_length": "11"}, {}])
async def test_body_is_bounded_before_it_is_read(length: dict[str, str]) -> None:
    """One that says so is not read at all, another only up to the bound; the application does not run."""
    ran: list[int] = []

    async def pay(_request: Request) -> None:
        ran.append(1)

    app = keyed(pay, max_body=10)
    requests: Messages = [{"type": "http.request", "body": b"12345", "more_body": True} for _ in range(9)]
    sent: Messages = []
    async with lockkit.aio.connect("memory://bounded") as client, asyncio.timeout(PATIENCE):
        await ask(app, client, requests, sent, idempotency_key="k", **length)

    assert (sent[0]["status"], ran) == (413, [])
    assert len(requests) == (9 if length else 6)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("media", "part", "gone"),
    [
        pytest.param("text/event-stream; charset=utf-8", b"data: 1\n\n", {}, id="events"),
        pytest.param("text/plain", b"x" * 70_000, {}, id="large"),
        pytest.param("text/plain", b"x", {"gone": "yes"}, id="client that has left"),
    ],
)
async def test_response_without_end_is_passed_on_and_ends_with_its_client(
    media: str, part: bytes, gone: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was kept in memory without a limit, also when its client had left. Its key is done: the work was begun."""
    monkeypatch.setattr("lockkit.integrations.idempotency.LEFT_SECONDS", 0.1)
    runs: list[int] = []

    async def pay(_request: Request) -> StreamingResponse:
        runs.append(1)

        async def parts() -> AsyncIterator[bytes]:
            while True:
                yield part
                await asyncio.sleep(0.01)

        return StreamingResponse(parts(), 201, media_type=media)

    app = keyed(pay)
    sent: Messages = []
    repeated: Messages = []
    async with lockkit.aio.connect("memory://endless") as client, asyncio.timeout(PATIENCE):
        await ask(app, client, [{"type": "http.request", "body": b"17"}], sent, idempotency_key=part[:9].hex(), **gone)
        await ask(app, client, [{"type": "http.request", "body": b"17"}], repeated, idempotency_key=part[:9].hex())

    assert ([one["status"] for one in sent[:1]], bool(sent)) == (([201], True) if not gone else ([], False))
    assert repeated[0]["status"] == 409
    assert b"retry-after" not in dict(repeated[0]["headers"])
    assert runs == [1]


@pytest.mark.asyncio
@pytest.mark.parametrize("status", [500, 307, 308])
async def test_large_refusal_is_passed_on_and_not_stored(status: int) -> None:
    """Its request was not done, or must be sent to another address, with this key."""

    async def pay(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("x" * 70_000, status)

    app = keyed(pay)
    async with lockkit.aio.connect("memory://errors") as client, asyncio.timeout(PATIENCE):
        for _ in range(2):
            sent: Messages = []
            await ask(app, client, [{"type": "http.request", "body": b""}], sent, idempotency_key="k")
            assert (sent[0]["status"], len(sent[1]["body"])) == (status, 70_000)


def test_path_and_body_are_compared_apart() -> None:
    """Moving text from one to the other makes another request, whatever it is."""
    lists = [("a", "b"), ("ab", ""), ("", "ab"), ("ab",), ("a", "", "b"), ("\ud800",), (b"\xff", "b"), (b"\xffb",)]

    assert len({_digest(*parts) for parts in lists}) == len(lists)
    assert _digest("a", b"b") == _digest(b"a", "b")


def test_case_of_a_method_does_not_matter() -> None:
    """Requests have it in capitals. One without a key runs each time."""
    with TestClient(payments(methods=["post"])) as client:
        assert [client.post("/").text for _ in range(2)] == ["1", "2"]
        first, second = (client.post("/", headers={"Idempotency-Key": "k"}) for _ in range(2))
    assert (first.headers.get("idempotent-replayed"), second.headers["idempotent-replayed"]) == (None, "true")


def test_response_is_kept_as_long_as_it_says() -> None:
    """Then the request runs again."""
    with TestClient(payments(keep=0.05)) as client:
        first = client.post("/", headers={"Idempotency-Key": "k"}).text
        while (repeat := client.post("/", headers={"Idempotency-Key": "k"}).text) == first:
            pass

    assert (first, repeat) == ("1", "2")


@pytest.mark.parametrize(("status", "answered"), [(201, 500), (404, 404)])
def test_key_that_was_lost_is_told_by_the_response_alone(status: int, answered: int) -> None:
    """The server sees no exception after it; a refusal needs no key."""

    async def pay(request: Request) -> PlainTextResponse:
        key = apart("once", f"idempotency:{_digest('ada', 'k')}")
        assert await client_of(request.scope)._engine.client.ready().break_lock(key)
        return PlainTextResponse("", status)

    app = Starlette(
        routes=[Route("/", pay, methods=["POST"])],
        middleware=[Middleware(IdempotencyMiddleware, caller=lambda _request: "ada")],
        lifespan=lifespan(f"memory://{secrets.token_hex(4)}"),
    )
    with TestClient(app) as client:
        assert client.post("/", headers={"Idempotency-Key": "k"}).status_code == answered


@pytest.mark.asyncio
async def test_response_is_stored_although_the_client_has_gone() -> None:
    """Its repeat gets it: a streaming response must not notice, and stop after the work was done."""
    runs: list[bytes] = []

    async def pay(request: Request) -> StreamingResponse:
        runs.append(await request.body())
        assert not await request.is_disconnected()

        async def parts() -> AsyncIterator[bytes]:
            for part in (b"pa", b"id"):
                yield part
                await asyncio.sleep(0.01)

        return StreamingResponse(parts(), 201)

    app = keyed(pay)
    async with lockkit.aio.connect("memory://gone") as client, asyncio.timeout(PATIENCE):
        for replayed in (False, True):
            sent: Messages = []
            request = [{"type": "http.request", "body": b"17"}]
            await ask(app, client, request, sent, idempotency_key="k", gone="yes")
            start, body = sent
            assert (start["status"], body["body"]) == (201, b"paid")
            assert ((b"idempotent-replayed", b"true") in start["headers"]) == replayed
    assert runs == [b"17"]


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [LookupError, asyncio.CancelledError])
async def test_leader_s_work_that_fails_is_logged_and_begins_again(
    caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    """In a later term. What it awaited may have been cancelled, which is no cancellation of the leader."""
    terms: list[int] = []
    second = asyncio.Event()

    async def work(term: lockkit.aio.Term) -> None:
        terms.append(term.token)
        if len(terms) == 1:
            raise error
        second.set()

    async with lockkit.aio.connect("memory://lead") as client:
        with caplog.at_level(logging.ERROR, "lockkit"):
            async with lead(client.election("a"), work, pause=0), asyncio.timeout(PATIENCE):
                await second.wait()
                assert await client.election("a").leader() is not None
        assert terms[1] > terms[0]
        assert await client.election("a").leader() is None
    assert caplog.text.count("the leader's work failed") == 1  # and not when the application ends


@pytest.mark.asyncio
async def test_campaign_that_fails_is_not_taken_for_the_leader_s_work(
    caplog: pytest.LogCaptureFixture, lockkit_aio_client: AioKitClient
) -> None:
    """Wrong credentials are no fault of the work, which has not begun, and its traceback helps nobody."""
    lockkit_aio_client.fail(lockkit.ConfigurationError("wrong password"), times=1)
    began = asyncio.Event()

    async def work(_term: lockkit.aio.Term) -> None:
        began.set()

    with caplog.at_level(logging.WARNING, "lockkit"):
        async with lead(lockkit_aio_client.election("a"), work, pause=0), asyncio.timeout(PATIENCE):
            await began.wait()
    assert caplog.text.count("election 'a': this process does not lead: wrong password") == 1
    assert "Traceback" not in caplog.text
    assert "work failed" not in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [None, LookupError])
async def test_work_that_does_not_pass_on_its_cancellation(error: type[Exception] | None) -> None:
    """It returns, or raises another error: after a loss the process campaigns again, and at the end it ends."""
    began = asyncio.Event()
    ended: list[int] = []

    async def work(term: lockkit.aio.Term) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(term.token)
            if error is not None:
                raise error from None

    async with lockkit.aio.connect("memory://lead-kept") as client, asyncio.timeout(PATIENCE):
        async with lead(client.election("a", ttl=0.6), work, pause=0):
            await began.wait()
            began.clear()
            await client.break_lock("a")
            await began.wait()
        assert await client.election("a").leader() is None
    assert len(ended) >= 2


@pytest.mark.asyncio
async def test_work_that_returns_is_not_done_by_the_next() -> None:
    """Its process goes on leading until it ends."""
    first, second = asyncio.Event(), asyncio.Event()

    def work(done: asyncio.Event) -> Callable[[lockkit.aio.Term], Awaitable[None]]:
        async def run(_term: lockkit.aio.Term) -> None:
            done.set()

        return run

    async with lockkit.aio.connect("memory://lead-once") as client, asyncio.timeout(PATIENCE):
        async with lead(client.election("a"), work(first)):
            await first.wait()
            async with lead(client.election("a"), work(second)):
                while not (await client.holders("a"))[0].waiters:  # noqa: ASYNC110 - the other campaign
                    await asyncio.sleep(0.01)
                assert not second.is_set()
        assert await client.election("a").leader() is None


async def terms(term: lockkit.aio.Term) -> AsyncIterator[lockkit.aio.Term]:
    """An async generator function, which nobody can await."""
    yield term


@pytest.mark.parametrize(("wrong", "value"), [("work", "no"), ("work", print), ("work", terms), ("pause", "no")])
@pytest.mark.asyncio
async def test_wrong_work_or_pause_is_told_at_the_start(wrong: str, value: object) -> None:
    """Work that cannot be awaited failed each second, and a pause that is no time ended the campaign."""
    given: dict[str, Any] = {"work": asyncio.sleep, "pause": 1.0, wrong: value}

    async with lockkit.aio.connect("memory://lead-wrong") as client:
        with pytest.raises(lockkit.ConfigurationError, match=f"^{wrong} must be"):
            async with lead(client.election("a"), **given):
                pytest.fail("it began")


@pytest.mark.parametrize("module", ["starlette", "fastapi"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timeout": -1}, "timeout must be 0 or more"),
        ({"ttl": 0}, "ttl must be"),
        ({"renew": "no"}, "renew must be True or False"),
        ({"cancel_on_lost": "no"}, "cancel_on_lost must be True or False"),
        ({"retry_after": "5"}, "retry_after must be seconds"),
        ({"blocking": False}, "use timeout=0 to try once"),
    ],
)
def test_wrong_option_is_an_error_where_the_endpoint_is_declared(
    module: str, options: dict[str, Any], says: str
) -> None:
    """Not a 500 for each request."""
    locked = importlib.import_module(f"lockkit.integrations.{module}").locked

    with pytest.raises((lockkit.ConfigurationError, TypeError), match=says):
        locked("seat:{seat}", **options)


@pytest.mark.parametrize("module", ["starlette", "fastapi"])
def test_endpoint_is_declared_whatever_scope_the_client_must_have(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client in memory that checks the options was refused, and so no application could start."""
    monkeypatch.setenv("LOCKKIT_SCOPE", "network")

    importlib.import_module(f"lockkit.integrations.{module}").locked("seat:{seat}")
