"""Leader election: when a leader must stop, on simulated time; campaigns, runs and observers on a scripted backend."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.backend import Gone, Grant, Holder, Unknown
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockLost
from lockkit.primitives import election
from lockkit.primitives.election import Leader
from lockkit.storage.tokens import stale_token
from lockkit.testing.face_driver import FaceDriver
from lockkit.testing.timing import PATIENCE
from lockkit_tools.simulation import Process
from lockkit_tools.simulation.world import Cancelled
from tests.engine.scripted import MovableClock, ScriptedBackend, fail, once, scripted
from tests.faces import both_faces
from tests.simulation.support import Stage, sleep
from tests.tries import beside

DOWN = BackendUnavailable("connection refused")
TTL = 3.0
GRACE = TTL / 3


def play(story: Callable[[Stage, Process], Coroutine[Any, Any, None]], seed: int = 1) -> None:
    """Run a story on simulated time."""
    stage = Stage(seed)
    alice = stage.process("alice")
    stage.play(alice, story(stage, alice))
    stage.end()


def deadline(term: Any) -> float:  # noqa: ANN401 - of either face
    """Return when a term's lease ends, client monotonic clock."""
    at: float = term._record.valid_until
    return at


@pytest.mark.parametrize("value", ["10.0.0.7:80", {"port": 80}, ""])
@pytest.mark.parametrize(
    ("metadata", "shown"),
    [
        ({"done": 3}, {"done": 3}),
        ("halfway", {"text": "halfway"}),
        (None, {}),
        ({"value": "elsewhere"}, {"value": "elsewhere"}),
    ],
)
@both_faces
async def test_metadata_of_a_leader_replace_all_but_its_value(
    driver: FaceDriver,
    metadata: Any,  # noqa: ANN401 - wrong on purpose
    shown: dict[str, Any],
    value: object,
) -> None:
    """Observers would no longer know where the leader is. A new value replaces it."""
    expected = {"value": value, **shown}
    own = (await driver.connect()).election("x", value=value)
    async with await own.campaign(timeout=PATIENCE) as term:
        await term.update(metadata)
        leader = await own.leader()
        with pytest.raises(ConfigurationError, match="metadata must be a str"):
            await term.update(3)  # type: ignore[arg-type]
    assert leader is not None
    assert (leader.owner, leader.term, leader.value) == (term.owner, term.token, expected["value"])
    assert {key: each for key, each in leader.metadata.items() if key not in {"host", "pid", "started"}} == expected


# -- must_stop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut_at", [0.0, 0.4, 1.1, 5.0])
@pytest.mark.parametrize("grace", [None, 0.0, 0.2, 1.4])
def test_leader_must_stop_grace_before_the_deadline(cut_at: float, grace: float | None) -> None:
    """The server cannot be reached any more: must_stop wakes at deadline - grace, with the grace left to stop in."""

    async def story(stage: Stage, alice: Process) -> None:
        client = stage.client(alice, call_timeout=0.2)
        term = await client.election("x", ttl=TTL, grace=grace).campaign()
        await sleep(alice, cut_at)
        stage.network.cut(alice, stage.node)

        assert await term.must_stop(None)

        expected = GRACE if grace is None else grace
        assert deadline(term) - alice.now() == pytest.approx(expected, abs=1e-6)
        assert term.lost == (expected == 0.0)
        stage.network.heal(alice, stage.node)
        if term.held:
            await term.resign()

    play(story)


def test_must_stop_waits_as_long_as_it_is_told() -> None:
    """False when the time is over, and not before; what is no time is refused."""

    async def story(stage: Stage, alice: Process) -> None:
        term = await stage.client(alice).election("x", ttl=TTL).campaign()
        for seconds in (0.0, 0.3, 1.0, 2.5, 10.0):
            began = alice.now()
            assert not await term.must_stop(seconds)
            assert alice.now() - began == pytest.approx(seconds, abs=1e-6)
        wrongs: list[Any] = [-1, float("nan"), "soon"]
        for wrong in wrongs:
            with pytest.raises(ConfigurationError):
                await term.must_stop(wrong)
        await term.resign()

    play(story)


def test_must_stop_stays_true() -> None:
    """A renewal that succeeds after that does not bring the leader back: one of its threads may have stopped."""

    async def story(stage: Stage, alice: Process) -> None:
        term = await stage.client(alice, call_timeout=0.1).election("x", ttl=TTL).campaign()
        stage.network.cut(alice, stage.node)
        assert await term.must_stop(None)
        stage.network.heal(alice, stage.node)
        await sleep(alice, TTL)

        assert term.held
        assert term.remaining() > GRACE
        assert await term.must_stop(0)
        await term.resign()

    play(story)


@pytest.mark.parametrize("begins", [part / 30 for part in range(30)])
def test_blip_of_a_fifth_of_the_ttl_ends_no_term(begins: float) -> None:
    """With the default grace, whenever it begins and though each call then takes a tenth of the ttl to fail."""

    async def story(stage: Stage, alice: Process) -> None:
        client = stage.client(alice, call_timeout=0.1 * TTL)
        term = await client.election("x", ttl=TTL).campaign()
        await sleep(alice, TTL + begins * TTL / 3)
        for _ in range(5):
            stage.network.cut(alice, stage.node)
            await sleep(alice, 0.2 * TTL)
            stage.network.heal(alice, stage.node)
            assert not await term.must_stop(TTL)
        await term.resign()

    for seed in range(5):
        play(story, seed)


def test_resigning_wakes_must_stop_in_other_tasks() -> None:
    """And the waits for a loss too, which then say that there was none."""

    async def story(stage: Stage, alice: Process) -> None:
        term = await stage.client(alice).election("x", ttl=30.0).campaign()
        asked = [alice.start(ask, "ask", awaited=True) for ask in (term.must_stop(None), term.wait_lost(None))]
        await sleep(alice, 1.0)
        await term.resign()
        for task in asked:
            assert await task.join(0.001)

        assert [task.result() for task in asked] == [True, False]
        await term.resign()

    play(story)


def test_paused_leader_must_stop_at_the_first_look() -> None:
    """Nothing of lockkit's has run since the pause; the clock decides."""
    clock = MovableClock()
    client, _ = scripted(clock)
    term = client.election("x", ttl=10).campaign()

    clock.added += 7

    assert term.held
    assert term.must_stop()
    term.resign()
    client.close()


# -- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"grace": 5}, r"grace .* below half of the ttl of 10 s, not 5 s"),
        ({"grace": -1}, "grace"),
        ({"grace": float("inf")}, "grace"),
        ({"grace": "long"}, "grace"),
        ({"ttl": 0}, "ttl"),
        ({"value": object()}, "JSON"),
        ({"value": "x" * 100_000}, "metadata"),
    ],
)
def test_wrong_arguments_are_refused_with_nothing_sent(options: dict[str, Any], said: str) -> None:
    """At the call that brought them in."""
    client, backend = scripted()

    with pytest.raises(ConfigurationError, match=said) as caught:
        client.election("x", **{"ttl": 10, **options})

    assert backend.calls == []
    assert caught.value.name == "x"
    client.close()


def test_grace_that_is_too_long_for_the_granted_ttl_is_refused() -> None:
    """A server may grant less than was asked for. Less time to stop than the leader needs would be worse than that."""
    client, backend = scripted()
    shorten(backend, 4.0)

    with pytest.raises(ConfigurationError, match=r"granted .* a ttl of 4 s: the grace of 3 s"):
        client.election("x", ttl=10, grace=3).campaign()
    with client.election("x", ttl=10).campaign() as term:
        assert term._record.renewal.grace == pytest.approx(4 / 3)

    assert client.holders("x") == []
    client.close()


def shorten(backend: ScriptedBackend, ttl: float) -> None:
    """Have a backend grant at most so long a ttl."""
    real = backend.try_acquire

    async def try_acquire(request: Any) -> Any:  # noqa: ANN401
        outcome = await real(request)
        if isinstance(outcome, Grant):
            outcome.ttl = min(outcome.ttl, ttl)
        return outcome

    backend.try_acquire = try_acquire  # type: ignore[method-assign]


# -- campaign --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [None, Gone("session"), Unknown(BackendUnavailable("refused"))])
def test_term_of_a_slow_grant_is_renewed_first(failure: Gone | Unknown | None) -> None:
    """Else it would be over at once. If its lease died meanwhile, or nobody answers, the candidate campaigns again."""
    clock = MovableClock()
    client, backend = scripted(clock)

    def slow() -> None:
        clock.added += 6.0

    backend.after["try_acquire"] = once(slow)
    client._engine.renewer.start = lambda: None  # the watch might renew it first
    answers, real = [[failure]] if failure else [], backend.renew

    async def renew(grants: Any) -> Any:  # noqa: ANN401
        if not answers:
            return await real(grants)
        backend._space.locks.clear()
        return answers.pop()

    backend.renew = renew  # type: ignore[method-assign]
    with client.election("x", ttl=10).campaign(timeout=PATIENCE) as term:
        assert not answers
        assert term.confirm()
        assert not term.must_stop()
        assert term.remaining() > 9
    client.close()


# -- run -------------------------------------------------------------------------------------------------------------


@both_faces
async def test_run_resigns_before_it_returns_or_raises_what_work_did(driver: FaceDriver) -> None:
    """Another candidate can lead at once; the loss of another lock is an exception like any other."""
    client = await driver.connect()

    async def work(term: Any) -> object:  # noqa: ANN401 - of either face
        return ("done", term.token > 0)

    async def other_loss(_: object) -> None:
        raise LockLost("another", name="y")

    assert await client.election("x").run(work) == ("done", True)
    assert await client.holders("x") == []
    with pytest.raises(LockLost, match="another"):
        await client.election("x").run(other_loss)
    assert await client.holders("x") == []


@pytest.mark.parametrize("notices", ["check", "storage", "not"])
def test_run_campaigns_again_after_a_loss(notices: str) -> None:
    """However the work notices it, and also if it does not."""
    client, _ = scripted()
    terms = []

    def work(term: lockkit.Term) -> str:
        terms.append(term.token)
        if len(terms) == 1:
            client.break_lock("x")
            client._engine.confirm_soon()
            assert term.wait_lost(PATIENCE)
            if notices == "check":
                term.check()
            if notices == "storage":
                raise stale_token("the change", term.token, term.token + 1)
        return f"result {len(terms)}"

    assert client.election("x").run(work) == "result 2"

    assert terms[1] > terms[0]
    client.close()


def test_run_campaigns_again_when_the_work_stopped_in_time() -> None:
    """Renewals failed, and the leader stopped and resigned before its deadline: not lost, but over."""
    clock = MovableClock()
    client, backend = scripted(clock)
    terms = []

    def work(term: lockkit.Term) -> int:
        terms.append(term.token)
        if len(terms) == 1:
            backend.before["renew"] = fail(DOWN)
            clock.added += 70
            assert term.must_stop()
            assert term.held
            del backend.before["renew"]
        return len(terms)

    assert client.election("x", ttl=100).run(work) == 2
    client.close()


def test_closing_the_client_ends_the_term_of_a_run() -> None:
    """What the work did last was not protected, so its result is none."""
    client, _ = scripted()
    terms: list[lockkit.Term] = []

    def work(term: lockkit.Term) -> str:
        terms.append(term)
        closing = beside(client.close)
        assert term.must_stop(PATIENCE)
        closing.result(PATIENCE)
        return "result"

    with pytest.raises(LockError, match="closed"):
        client.election("x").run(work)

    (term,) = terms
    assert term.lost


@both_faces
async def test_stop_ends_a_term(driver: FaceDriver) -> None:
    """must_stop is True, and what the work returns then is returned."""
    client = await driver.connect()
    stop, begun = driver.stop_event(), driver.signal()

    async def work(term: Any) -> bool:  # noqa: ANN401 - of either face
        begun.set()
        return bool(await term.must_stop(PATIENCE))

    run = driver.spawn(client.election("x").run(work, stop))
    await begun.wait()
    stop.set()

    assert await run.result() is True
    assert await client.holders("x") == []
    assert await client.election("x").run(work, stop) is None


def test_run_refuses_what_it_cannot_wait_for() -> None:
    """Work that would be called and never run, and events of the other API: the leader would never stop."""

    async def coroutine(_: object) -> None: ...

    class Work:
        async def __call__(self, _: object) -> None: ...

    client, backend = scripted()
    refused: list[tuple[Any, Any, str]] = [
        (coroutine, None, r"lockkit\.aio"),
        (Work(), None, r"lockkit\.aio"),
        (print, asyncio.Event(), r"takes a threading\.Event as stop, not asyncio\."),
        (print, object(), r"takes a threading\.Event as stop, not builtins\."),
    ]
    for work, stop, said in refused:
        with pytest.raises(ConfigurationError, match=said):
            client.election("x").run(work, stop)
    assert backend.calls == []
    client.close()

    set_already = threading.Event()
    set_already.set()  # so that this test does not hang if the event is waited for

    async def main() -> None:
        async with lockkit.aio.connect("memory://election-stop") as other:
            contest: Any = other.election("x")
            with pytest.raises(ConfigurationError, match=r"takes an asyncio\.Event as stop, not threading\.Event"):
                await contest.run(coroutine, set_already)
            with pytest.raises(ConfigurationError, match=r"the function that does the leader's work, not None"):
                await contest.run(None)

    asyncio.run(main())


# -- cancel_on_stop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("awaited", [False, True])
def test_body_is_cancelled_at_deadline_minus_grace(awaited: bool) -> None:  # noqa: FBT001 - a parameter
    """With LockLost in place of the cancellation, and the election free for others before the deadline."""

    async def story(stage: Stage, alice: Process) -> None:
        client = stage.client(alice, call_timeout=0.1)
        campaign = client.election("x", ttl=TTL).campaign(cancel_on_stop=True)
        left = None
        with pytest.raises(LockLost, match=r"stopped 1 s before the deadline"):  # noqa: PT012 - the body is the point
            async with await campaign if awaited else campaign as term:
                stage.network.cut(alice, stage.node)
                try:
                    await sleep(alice, 60.0)
                except Cancelled:
                    left = deadline(term) - alice.now()
                    stage.network.heal(alice, stage.node)
                    raise

        assert left == pytest.approx(GRACE, abs=1e-6)
        assert await client.holders("x") == []

    play(story)


def test_body_is_cancelled_when_the_term_is_lost() -> None:
    """The error says that: nobody has stopped the leader in time."""

    async def story(stage: Stage, alice: Process) -> None:
        client = stage.client(alice)
        with pytest.raises(LockLost, match=r"^lost lock 'x'"):  # noqa: PT012 - the body is the point
            async with client.election("x", ttl=TTL).campaign(cancel_on_stop=True):
                await client.break_lock("x")
                await sleep(alice, 60.0)
        assert alice.now() < TTL

    play(story)


def test_resigning_in_another_task_ends_the_body_quietly() -> None:
    """That was intended."""

    async def story(stage: Stage, alice: Process) -> None:
        client = stage.client(alice)
        async with client.election("x").campaign(cancel_on_stop=True) as term:
            alice.start(term.resign(), "resign")
            await sleep(alice, 60.0)
        assert alice.now() < 30.0

    play(story)


# -- who leads -------------------------------------------------------------------------------------------------------


def test_leader_shows_the_text_of_a_foreign_client() -> None:
    """What etcdctl or kazoo stored; but not the text of a lock of lockkit's, which is another thing."""
    client, _ = scripted()
    contest = client.election("x")
    assert contest.leader() is None
    with client.lock("x", metadata="text"):
        assert contest.leader().value is None

    found = election._leader_of(Holder("them", None, None, {"text": "proposal"}))
    assert found == Leader("them", None, "proposal", {"text": "proposal"})
    client.close()


def serving(client: Any, answers: list[Holder | BaseException | None]) -> None:  # noqa: ANN401 - of either face
    """Have a client's backend answer to `holders` what is in the list, the last one for ever."""

    async def holders(_: str) -> list[Holder]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return [] if answer is None else [answer]

    client._engine._backend.holders = holders


@both_faces
async def test_observer_reports_each_change_once_and_never_an_older_term(
    driver: FaceDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """A member that lags behind answers with an older leader: ignored. An outage: waited for; other errors: raised."""
    one, two, three = (Holder(f"owner{term}", term, None, {"value": term}) for term in (1, 2, 3))
    client = await driver.connect()
    denied = ConfigurationError("wrong password")
    serving(client, [None, None, one, one, two, one, DOWN, DOWN, one, two, DOWN, None, three, three, denied])
    caplog.set_level(logging.WARNING, "lockkit")

    leaders = client.election("x", ttl=0.1).observe()
    seen = [await anext(leaders) for _ in range(5)]

    assert [leader and leader.term for leader in seen] == [None, 1, 2, None, 3]
    assert caplog.text.count("connection refused") == 2  # once for each outage
    assert caplog.text.count("ignored term 1, which is older than 2") == 1
    with pytest.raises(ConfigurationError, match="wrong password"):
        await anext(leaders)


def test_observer_polls_with_pauses() -> None:
    """At random intervals between half of the bound and the bound."""

    async def story(stage: Stage, alice: Process) -> None:
        client: Any = stage.client(alice)
        asked: list[float] = []
        real = client._engine._backend.holders

        async def holders(name: str) -> Any:  # noqa: ANN401
            asked.append(alice.now())
            return await real(name)

        client._engine._backend.holders = holders
        leaders = client.election("x", ttl=30.0).observe()
        assert await anext(leaders) is None
        task: Any = alice.start(anext(leaders), "observe", awaited=True)
        await sleep(alice, 60.0)
        assert not task.done
        pauses = [later - earlier for earlier, later in pairwise(asked[1:])]
        assert 60 <= len(pauses) <= 120
        assert 0.5 <= min(pauses) < 0.6
        assert 0.9 < max(pauses) < 1.01
        async with client.election("x").campaign() as term:
            assert await task.join(1.1)
            assert task.result().term == term.token

    play(story)


@both_faces
async def test_closing_the_client_ends_an_observer_that_waits(driver: FaceDriver) -> None:
    """At once, without an error."""
    client = await driver.connect()
    leaders = client.election("x").observe()
    assert await anext(leaders) is None

    async def read() -> list[Leader | None]:
        return [leader async for leader in leaders]

    reading = driver.spawn(read())
    await driver.eventually(lambda: bool(client._engine.client.sleeping), "the observer waits")
    await client.close()

    assert await reading.result() == []
    with pytest.raises(LockError, match="closed"):
        client.election("x")
