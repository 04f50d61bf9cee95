"""Once per key: what it costs, whom it survives, and what it refuses; the rest is in the conformance suite."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import lockkit
from lockkit import aio
from lockkit.backend import NOTE_BYTES_MAX, Grant, Request, apart, split_space
from lockkit.errors import BackendUnavailable
from lockkit.primitives.once import ERROR_CHARS_MAX, ERROR_TYPE_CHARS_MAX, SPACE, digest
from lockkit.runtime import drive
from lockkit.testing.face_driver import FaceDriver
from lockkit.testing.timing import PATIENCE
from lockkit.validation import VALUE_BYTES_MAX
from lockkit_tools.servers.proxy import FaultProxy
from lockkit_tools.servers.redis import RedisServer
from tests.engine.scripted import ScriptedBackend, fail, once, scripted
from tests.faces import both_faces, scripted_for

KEEP = 600.0

WRITE = "write_note"

NESTED: list[Any] = []
for _ in range(3000):
    NESTED = [NESTED]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One Redis for the tests that do not end it."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def client() -> Iterator[lockkit.Client]:
    """A client on memory, in a space of its own."""
    with lockkit.connect(f"memory://once{os.urandom(4).hex()}") as client:
        yield client


def test_run_that_asks_for_its_own_key_is_told_so(client: lockkit.Client) -> None:
    """It cannot be reentrant, as a lock could. The message names the key, not the name under which it is stored."""
    said = r"^lock 'charge:17' \(once\) at memory://.*asks for its own key"
    with client.once("charge:17", keep=KEEP), pytest.raises(lockkit.LockTimeout, match=said) as caught:
        client.once("charge:17", keep=KEEP, timeout=0).__enter__()

    assert caught.value.name == "charge:17"


@both_faces
async def test_close_during_a_run_is_loss(driver: FaceDriver) -> None:
    """Another client may run the key at once: the run must not end as if it had been alone."""
    client, other = await driver.connect(), await driver.connect()

    with pytest.raises(lockkit.LockLost, match="client, session"):  # noqa: PT012 - the block is what is tested
        async with client.once("key", keep=KEEP) as attempt:
            await client.close()
            with pytest.raises(lockkit.LockLost):
                await attempt.done()
            async with other.once("key", keep=KEEP, timeout=0) as next_attempt:
                assert next_attempt.first


# -- names -----------------------------------------------------------------------------------------------------------


def test_name_apart_is_no_lock_name_and_shows_what_the_user_gave() -> None:
    """No lock of an application can have it."""
    name = apart("once", "charge:17")

    assert split_space(name) == ("once", "charge:17")
    assert split_space("charge:17") == ("", "charge:17")
    assert repr(name) == "'charge:17' (once)"
    with pytest.raises(lockkit.ConfigurationError, match="NUL"), lockkit.connect("memory://") as client:
        client.lock(name)
    assert lockkit.LockError("x", name=name).name == "charge:17"


# -- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "options", "message"),
    [
        ("key", {"keep": 0}, "keep must be more than 0"),
        ("key", {"keep": -1}, "keep must be more than 0"),
        ("key", {"keep": math.inf}, "keep must be a finite"),
        ("key", {"keep": 1e10}, "keep must be at most"),
        ("key", {"keep": "day"}, "keep must be seconds"),
        ("key", {"keep": 1, "match": 5}, "match must be a str"),
        ("key", {"keep": 1, "match": NESTED}, "match must be a str.*RecursionError"),
        ("key", {"keep": 1, "store_errors": ("ValueError",)}, "store_errors must be a tuple of exception classes"),
        ("key", {"keep": 1, "store_errors": [ValueError]}, "store_errors must be a tuple of exception classes"),
        ("key", {"keep": 1, "ttl": 0}, "ttl"),
        ("key", {"keep": 1, "timeout": -1}, "timeout"),
        *((key, {"keep": 1}, "lock name") for key in ("", "a\0b", "k" * 256, 17)),
        ("{order}", {"keep": 1}, "has no parameter"),
        ("key", {"keep": 1, "match": "{amount}"}, "has no parameter"),
    ],
)
def test_wrong_arguments_are_refused_at_once(
    client: lockkit.Client,
    key: Any,  # noqa: ANN401 - wrong on purpose
    options: dict[str, Any],
    message: str,
) -> None:
    """Nothing is sent. In the async API a plain function is refused too: it could not wait."""
    with pytest.raises(lockkit.ConfigurationError, match=message):
        client.once(key, **options)(lambda: None)
    with pytest.raises(lockkit.ConfigurationError, match="not a coroutine function"):
        aio.connect("memory://").once("key", keep=1)(lambda: None)


def test_result_comes_back_as_json_keeps_it(client: lockkit.Client) -> None:
    """The first call has it as the work returned it."""
    kept = client.once("tuple", keep=KEEP)(lambda: {1: ("a", "b")})
    assert [kept(), kept()] == [{1: ("a", "b")}, {"1": ["a", "b"]}]


def test_done_that_comes_too_late_says_why(client: lockkit.Client) -> None:
    """After a block without it, the key is not done: the message must not say that it is."""
    once = client.once("a", keep=60)
    with once as attempt:
        pass
    with pytest.raises(lockkit.LockError, match="its block has ended, and the key is not done"):
        attempt.done()
    with once as attempt:
        attempt.done()
        with pytest.raises(lockkit.LockError, match="done already"):
            attempt.done()


def test_stored_errors_are_cut_and_survive_pickling(client: lockkit.Client) -> None:
    """However long their text is."""

    @client.once("key", keep=KEEP, store_errors=ValueError)
    def work() -> None:
        raise UnicodeError("\ud800" + "x" * 100_000)  # a ValueError

    with pytest.raises(UnicodeError):
        work()
    with pytest.raises(lockkit.StoredError) as caught:
        work()

    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert (copy.type_name, len(copy.text)) == ("UnicodeError", ERROR_CHARS_MAX)
    assert copy.name == "key"


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_done_key_costs_one_round_trip_and_no_lock(server: RedisServer) -> None:
    """And a first run five: read, acquire, read again, note, release. A plain lock is still two."""
    with (
        FaultProxy(server.host, server.port) as proxy,
        lockkit.connect(f"redis://{proxy.address}") as client,
    ):
        sent = bytearray()

        def count(request: bytes) -> bool:
            sent.extend(request)
            return False  # nothing is dropped

        def commands() -> list[bytes]:
            names = re.findall(rb"\*\d+\r\n\$\d+\r\n(\w+)", sent)
            sent.clear()
            return names

        proxy.drop_next_reply(match=count)
        for key in ("warm", "counted"):
            commands()
            with client.once(key, keep=KEEP, timeout=PATIENCE) as attempt:
                attempt.done(1)
        assert commands() == [b"EVALSHA"] * 5
        with client.once("counted", keep=KEEP, timeout=PATIENCE) as attempt:
            assert not attempt.first
        assert commands() == [b"EVALSHA"]
        with client.lock("counted", timeout=PATIENCE):
            pass
        assert commands() == [b"EVALSHA"] * 2
    with server.connect() as connection:
        assert connection.call("EXISTS", "lockkit+once:counted") == 0
        assert 0 < int(str(connection.call("PTTL", "{lockkit+once:counted}:note"))) <= KEEP * 1000


def test_largest_note_has_room_for_the_largest_result_and_error() -> None:
    """With what is stored beside them."""
    assert len(f'{{"done":1,"match":"{digest("x")}","result":}}') + VALUE_BYTES_MAX <= NOTE_BYTES_MAX
    assert 6 * (ERROR_CHARS_MAX + ERROR_TYPE_CHARS_MAX) + 1000 <= NOTE_BYTES_MAX


def test_notes_in_memory_do_not_pile_up(client: lockkit.Client) -> None:
    """Those whose life is over go when the next one is written."""
    for number in range(100):
        with client.once(f"key{number}", keep=0.001) as attempt:
            attempt.done("x" * 1000)
    threading.Event().wait(0.01)
    with client.once("last", keep=KEEP) as attempt:
        attempt.done()

    space = client._engine.client.ready()._space  # type: ignore[attr-defined]
    assert list(space.notes) == [apart(SPACE, "last")]
    assert len(space._ends) == 1


# -- outages ---------------------------------------------------------------------------------------------------------


class Noting(ScriptedBackend):
    """The scripted backend, with hooks around the writing of notes."""

    async def write_note(self, grant: Grant, text: str, keep: float, answer_by: float = math.inf) -> bool:
        """See `LockBackend.write_note`."""
        self._enter(WRITE)
        written = await super().write_note(grant, text, keep, answer_by)
        self.after.get(WRITE, lambda: None)()
        return written


@pytest.fixture
def scripted_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[lockkit.Client, ScriptedBackend]]:
    """A client whose backend fails on order."""
    monkeypatch.setattr("tests.engine.scripted.ScriptedBackend", Noting)
    client, backend = scripted()
    with client:
        yield client, backend


@pytest.mark.parametrize("when", ["before", "after"])
def test_note_is_written_again_after_an_outage(
    scripted_client: tuple[lockkit.Client, ScriptedBackend], when: str
) -> None:
    """Whether the first attempt was carried out or not."""
    client, backend = scripted_client
    hooks = backend.before if when == "before" else backend.after
    hooks[WRITE] = once(fail(BackendUnavailable("away")))

    with client.once("key", keep=KEEP) as attempt:
        attempt.done("result")

    assert backend.calls.count(WRITE) == 2
    assert client.once("key", keep=KEEP).__enter__().result == "result"


def test_note_is_tried_until_the_lease_ends(scripted_client: tuple[lockkit.Client, ScriptedBackend]) -> None:
    """Then the run is lost, as its holder must know."""
    client, backend = scripted_client
    backend.before[WRITE] = backend.before["renew"] = fail(BackendUnavailable("away"))

    with (
        pytest.raises(lockkit.LockLost, match="deadline passed"),
        client.once("key", keep=KEEP, ttl=0.3) as attempt,
    ):
        attempt.done("result")

    backend.before.clear()
    with client.once("key", keep=KEEP, timeout=PATIENCE) as attempt:
        assert attempt.first


def test_note_is_tried_for_a_ttl_while_the_lease_is_renewed(
    scripted_client: tuple[lockkit.Client, ScriptedBackend],
) -> None:
    """A server that is full renews and takes no note: its callers must not hang as long as it is full."""
    client, backend = scripted_client
    backend.before[WRITE] = fail(BackendUnavailable("full"))

    with (
        pytest.raises(BackendUnavailable, match="write the note on lock 'key'") as caught,
        client.once("key", keep=KEEP, ttl=0.6) as attempt,
    ):
        attempt.done("result")

    assert caught.value.name == "key"
    assert backend.calls.count(WRITE) > 1
    backend.before.clear()
    with client.once("key", keep=KEEP, timeout=PATIENCE) as attempt:
        assert attempt.first


def test_loss_after_the_note_is_no_error(scripted_client: tuple[lockkit.Client, ScriptedBackend]) -> None:
    """The result is stored: nothing runs again."""
    client, backend = scripted_client

    def lose() -> None:
        assert drive(backend.break_lock(apart(SPACE, "key")))

    backend.after[WRITE] = lose

    with client.once("key", keep=KEEP) as attempt:
        attempt.done("result")

    assert client.once("key", keep=KEEP).__enter__().result == "result"


@pytest.mark.parametrize("form", ["block", "function", "coroutine function"])
def test_error_while_the_result_is_stored_is_not_stored_as_the_outcome(
    scripted_client: tuple[lockkit.Client, ScriptedBackend], form: str
) -> None:
    """The work has succeeded: a time limit that a signal handler raises in `done` says nothing about it."""
    client, backend = scripted_client
    kept = client.once("key", keep=KEEP, timeout=PATIENCE, store_errors=Exception)
    backend.before[WRITE] = once(fail(RuntimeError("the time limit of the job")))

    async def work() -> str:
        return "result"

    def run() -> Any:  # noqa: ANN401 - any JSON
        if form == "coroutine function":
            return asyncio.run(kept(work)())
        if form == "function":
            return kept(lambda: "result")()
        with kept as attempt:
            if attempt.first:
                attempt.done("result")
        return attempt.result

    with pytest.raises(RuntimeError, match="the time limit of the job"):
        run()
    assert client._engine.leases.records == {}
    assert run() == "result"


@pytest.mark.parametrize("call", ["begin", "forget"])
def test_failure_of_lockkit_is_not_stored_as_the_outcome(
    scripted_client: tuple[lockkit.Client, ScriptedBackend], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """While it holds the key and looks whether it is done: the work has not failed, it has not run."""
    client, backend = scripted_client
    kept = client.once("key", keep=KEEP, timeout=PATIENCE, store_errors=Exception)
    if call == "forget":
        kept(lambda: "result")()
    read, hook = backend.read_note, once(fail(BackendUnavailable("away")))

    async def read_note(name: str, answer_by: float) -> Any:  # noqa: ANN401
        if client._engine.leases.records:
            hook()
        return await read(name, answer_by)

    monkeypatch.setattr(backend, "read_note", read_note)
    with pytest.raises(BackendUnavailable, match="away"):
        kept.forget() if call == "forget" else kept(lambda: "result")()

    assert kept(lambda: "result")() == "result"


def test_key_is_freed_although_its_error_cannot_be_stored(
    scripted_client: tuple[lockkit.Client, ScriptedBackend],
) -> None:
    """Whatever prevents it; the caller gets the error of the body, unless Ctrl-C came."""
    client, backend = scripted_client

    class NoTextError(Exception):
        def __str__(self) -> str:
            raise TypeError

    for error, hook, raised in (
        (LookupError("of the body"), fail(lockkit.ConfigurationError("no right to write")), LookupError),
        (LookupError("of the body"), fail(KeyboardInterrupt()), KeyboardInterrupt),
        (NoTextError(), lambda: None, TypeError),
    ):
        backend.before[WRITE] = hook
        with pytest.raises(raised), client.once("key", keep=KEEP, store_errors=Exception) as attempt:
            raise error
        assert client._engine.leases.records == {}
        with client.once("key", keep=KEEP, timeout=PATIENCE) as again:
            assert again.first
        assert attempt.first


@both_faces
@pytest.mark.parametrize("held", [False, True])
async def test_call_with_a_timeout_does_not_wait_for_a_note_that_is_not_read(
    driver: FaceDriver,
    monkeypatch: pytest.MonkeyPatch,
    held: bool,  # noqa: FBT001 - of pytest
) -> None:
    """Neither before it acquires the lock nor with it; then it does not wait long for the release, either."""
    client, backend = scripted_for(driver)
    runtime, read = client._engine.runtime, backend.read_note
    hanging, bounds = runtime.event(), []

    async def hang(name: str, answer_by: float) -> Any:  # noqa: ANN401
        if bool(client._engine.leases.records) is held and not await hanging.wait(answer_by - runtime.now()):
            raise BackendUnavailable("no answer in time")
        return await read(name)

    async def release(_: Grant, answer_by: float = math.inf) -> bool:
        bounds.append(answer_by - runtime.now())
        raise BackendUnavailable("hangs")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "read_note", hang)
        patch.setattr(backend, "release", release)
        with pytest.raises(BackendUnavailable, match=r"read the note on lock .key.*no answer in time") as caught:
            await client.once("key", keep=KEEP, timeout=0).__aenter__()
        assert not hanging.is_set()
        assert caught.value.name == "key"
    assert all(bound < 0.5 for bound in bounds[:1])
    assert bool(bounds) is held
    hanging.set()
    async with client.once("key", keep=KEEP, timeout=PATIENCE) as attempt:  # the background has released it
        assert attempt.first


@both_faces
async def test_leaving_does_not_wait_for_an_error_that_is_not_stored(
    driver: FaceDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note and the release have the time of a release together, whatever the ttl is; the work runs again."""
    monkeypatch.setattr("lockkit.primitives.once.RELEASE_SECONDS", 0.1)
    client, backend = scripted_for(driver)
    runtime = client._engine.runtime
    hanging = runtime.event()

    async def hang(_: Grant, text: str, keep: float, answer_by: float) -> bool:
        del text, keep
        await hanging.wait(answer_by - runtime.now())
        raise BackendUnavailable("hangs")

    monkeypatch.setattr(backend, "write_note", hang)
    with pytest.raises(LookupError) as caught:
        async with client.once("key", keep=KEEP, ttl=PATIENCE, store_errors=LookupError):
            raise LookupError

    assert not hanging.is_set()
    assert "could not write the note on lock 'key'" in caught.value.__notes__[0]
    assert "could not release lock 'key'" in caught.value.__notes__[1]
    hanging.set()
    async with client.once("key", keep=KEEP, timeout=PATIENCE) as attempt:
        assert attempt.first


def write_record(client: lockkit.Client, *texts: str) -> Iterator[None]:
    """Write the note on the key ``k`` past the engine; yield after each."""
    backend = client._engine.client.ready()
    request = Request(apart(SPACE, "k"), "0" * 32, 30.0, "{}", queue=False, runtime=client._engine.runtime)
    grant = drive(backend.try_acquire(request))
    assert isinstance(grant, Grant)
    for text in texts:
        assert drive(backend.write_note(grant, text, KEEP))
        yield
    assert drive(backend.release(grant))


@pytest.mark.parametrize(
    "text",
    [
        '{"version":2}',
        "[" * 4000,
        '{"done":' * 2000,
        "5",
        "[1]",
        '"done"',
        '{"done":1,"error":[1]}',
        '{"done":1,"result":NaN}',
    ],
)
def test_record_of_strangers_runs_nothing(client: lockkit.Client, text: str) -> None:
    """It may be the completion of a newer version: calls, `state` and `forget` say so."""
    assert list(write_record(client, text)) == [None]
    once = client.once("k", keep=KEEP, timeout=0)

    for ask in (once.__enter__, once.state, once.forget):
        with pytest.raises(lockkit.LockError, match="not written by this version"):
            ask()


def test_state_reads_a_record_of_an_older_lockkit(client: lockkit.Client) -> None:
    """Without the time of its completion; with types that none has written there."""
    texts = '{"done":1,"match":null,"result":7}', '{"done":1,"result":7,"since":"x","keep":[]}'
    for _ in write_record(client, *texts):
        state = client.once("k", keep=KEEP).state()
        assert isinstance(state, lockkit.OnceDone)
        assert (state.since, state.result) == (None, 7)
        assert state.until is not None
