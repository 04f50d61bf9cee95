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
from lockkit.backend import Gone, Grant, Holder
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockLost, LockTimeout
from lockkit.primitives import election
from lockkit.primitives.election import Leader
from lockkit.runtime import AsyncioRuntime
from lockkit.testing.timing import PATIENCE
from lockkit_tools.simulation import Process
from lockkit_tools.simulation.world import Cancelled
from tests.engine.scripted import MovableClock, ScriptedBackend, fail, once, scripted
from tests.engine.test_engine import waiting
from tests.simulation.support import Stage, sleep
from tests.tries import until

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


@pytest.mark.parametrize("value", ["10.0.0.7:80", {"port": 80}])
@pytest.mark.parametrize(
    ("metadata", "shown"),
    [
        ({"done": 3}, {"done": 3}),
        ("halfway", {"text": "halfway"}),
        (None, {}),
        ({"value": "elsewhere"}, {"value": "elsewhere"}),
    ],
)
def test_metadata_of_a_leader_replace_all_but_its_value(metadata: object, shown: dict[str, Any], value: object) -> None:
    """Observers would no longer know where the leader is. A new value replaces it."""
    expected = {"value": value, **shown}

    with lockkit.connect("memory://") as client:
        own = client.election("x", value=value)
        with own.campaign(timeout=PATIENCE) as term:
            term.update(metadata)  # type: ignore[arg-type]
            leader = own.leader()
            with pytest.raises(ConfigurationError, match="metadata must be a str"):
                term.update(3)  # type: ignore[arg-type]
    assert leader is not None
    assert leader.value == expected["value"]
    assert {key: each for key, each in leader.metadata.items() if key not in {"host", "pid", "started"}} == expected

    async def main() -> None:
        async with lockkit.aio.connect("memory://") as client:
            own = client.election("x", value=value)
            async with await own.campaign(timeout=PATIENCE) as term:
                await term.update(metadata)  # type: ignore[arg-type]
                leader = await own.leader()
        assert leader is not None
        assert leader.value == expected["value"]

    asyncio.run(main())


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
    """False when the time is over, and not before."""

    async def story(stage: Stage, alice: Process) -> None:
        term = await stage.client(alice).election("x", ttl=TTL).campaign()
        for seconds in (0.0, 0.3, 1.0, 2.5, 10.0):
            began = alice.now()
            assert not await term.must_stop(seconds)
            assert alice.now() - began == pytest.approx(seconds, abs=1e-6)
        await term.resign()

    play(story)


@pytest.mark.parametrize("wrong", [-1, float("nan"), "soon"])
def test_must_stop_refuses_what_is_no_time(wrong: object) -> None:
    """As every wait."""
    client, _ = scripted()
    with client.election("x").campaign() as term, pytest.raises(ConfigurationError):
        term.must_stop(wrong)
    client.close()


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


def test_loss_wakes_must_stop() -> None:
    """The backend says that the term has ended: at the next renewal, long before the deadline."""

    async def story(stage: Stage, alice: Process) -> None:
        client = stage.client(alice)
        term = await client.election("x", ttl=30.0).campaign()
        await client.break_lock("x")

        assert await term.must_stop(15.0)

        assert term.lost
        with pytest.raises(LockLost):
            await term.resign()

    play(story)


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


def test_campaign_times_out_while_another_leads() -> None:
    """With the holder in the message."""
    client, _ = scripted()
    with client.election("x").campaign(), pytest.raises(LockTimeout, match="'x'"):
        client.election("x").campaign(timeout=0)
    client.close()


def test_term_of_a_slow_grant_is_renewed_first() -> None:
    """Else it would be over at once."""
    clock = MovableClock()
    client, backend = scripted(clock)

    def slow() -> None:
        clock.added += 6.0

    backend.after["try_acquire"] = once(slow)

    with client.election("x", ttl=10).campaign() as term:
        assert not term.must_stop()
        assert term.remaining() > 9

    assert backend.calls.count("renew") >= 1
    client.close()


def test_term_that_ended_before_it_began_is_never_returned() -> None:
    """The candidate campaigns again: its key died while it waited."""
    clock = MovableClock()
    client, backend = scripted(clock)

    def slow() -> None:
        clock.added += 6.0

    backend.after["try_acquire"] = once(slow)
    answers = [[Gone("session")]]
    real = backend.renew

    async def renew(grants: Any) -> Any:  # noqa: ANN401
        return answers.pop() if answers else await real(grants)

    backend.renew = renew  # type: ignore[method-assign]
    # The first grant is gone at the server, too.
    dead = client.election("x", ttl=10).campaign(timeout=PATIENCE)

    assert not answers
    assert dead.confirm()
    assert not dead.must_stop()
    dead.resign()
    client.close()


# -- run -------------------------------------------------------------------------------------------------------------


def test_run_returns_what_work_returned_and_resigns() -> None:
    """It ended by itself."""
    client, _ = scripted()

    assert client.election("x").run(lambda term: ("done", term.token > 0)) == ("done", True)

    assert client.holders("x") == []
    client.close()


def test_run_resigns_before_it_raises_what_work_raised() -> None:
    """Another candidate can lead at once."""
    client, backend = scripted()

    def work(_: object) -> None:
        raise ValueError("from work")

    with pytest.raises(ValueError, match="from work"):
        client.election("x").run(work)

    assert backend.calls[-1] == "release"
    assert client.holders("x") == []
    client.close()


@pytest.mark.parametrize("notices", ["must_stop", "check", "not"])
def test_run_campaigns_again_after_a_loss(notices: str) -> None:
    """However the work notices it, and also if it does not."""
    client, _ = scripted()
    terms = []

    def work(term: lockkit.Term) -> str:
        terms.append(term.token)
        if len(terms) == 1:
            client.break_lock("x")
            client._engine.confirm_soon()
            if notices == "must_stop":
                assert term.must_stop(PATIENCE)
            else:
                assert term.wait_lost(PATIENCE)
            if notices == "check":
                term.check()
        return f"result {len(terms)}"

    assert client.election("x").run(work) == "result 2"

    assert terms[1] > terms[0]
    client.close()


def test_run_raises_the_loss_of_another_lock() -> None:
    """That is an exception of the work."""
    client, _ = scripted()

    def work(_: object) -> None:
        raise LockLost("another", name="y")

    with pytest.raises(LockLost, match="another"):
        client.election("x").run(work)

    assert client.holders("x") == []
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
        closer = threading.Thread(target=client.close)
        closer.start()
        assert term.must_stop(PATIENCE)
        closer.join(PATIENCE)
        return "result"

    with pytest.raises(LockError, match="closed"):
        client.election("x").run(work)

    (term,) = terms
    assert term.lost


def test_stop_ends_a_term() -> None:
    """must_stop is True, and what the work returns then is returned."""
    client, _ = scripted()
    stop = threading.Event()

    def work(term: Any) -> bool:  # noqa: ANN401
        threading.Timer(0.1, stop.set).start()
        return bool(term.must_stop(PATIENCE))

    assert client.election("x").run(work, stop) is True

    assert client.holders("x") == []
    client.close()


def test_stop_ends_a_campaign_and_leaves_nothing_behind() -> None:
    """At the backend, and in the client's queue behind another candidate."""
    client, backend = scripted()
    stop, results = threading.Event(), list[object]()
    threads = [
        threading.Thread(target=lambda: results.append(client.election("x").run(lambda _: "led", stop)))
        for _ in range(2)
    ]
    with client.election("x").campaign():
        for thread in threads:
            thread.start()
        until(lambda: "wait" in backend.calls and waiting(client, 1))
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)

    assert results == [None, None]
    assert client._engine.acquisitions.waiting_count("x") == 0
    assert client.election("x").run(lambda _: "led", stop) is None
    client.close()


def test_asyncio_stop_ends_campaign_and_term() -> None:
    """The same on asyncio."""

    async def main() -> None:
        client, _ = scripted(AsyncioRuntime())
        stop = asyncio.Event()

        async def work(term: Any) -> bool:  # noqa: ANN401
            asyncio.get_running_loop().call_later(0.05, stop.set)
            return bool(await term.must_stop(PATIENCE))

        assert await client.election("x").run(work, stop) is True
        stop.clear()
        async with client.election("x").campaign():
            asyncio.get_running_loop().call_later(0.05, stop.set)
            assert await client.election("x").run(work, stop) is None
        assert await client.election("x").run(work, stop) is None
        assert await client.holders("x") == []
        await client.close()
        await asyncio.sleep(0)
        assert not any("_follow" in repr(task) for task in asyncio.all_tasks())

    asyncio.run(main())


def test_run_refuses_a_coroutine_function_in_the_sync_api() -> None:
    """It would be called and never run."""
    client, backend = scripted()

    async def work(_: object) -> None:
        await asyncio.sleep(0)

    class Work:
        async def __call__(self, _: object) -> None:
            await asyncio.sleep(0)

    for given in (work, Work()):
        with pytest.raises(ConfigurationError, match=r"lockkit\.aio"):
            client.election("x").run(given)

    assert backend.calls == []
    client.close()


@pytest.mark.parametrize("stop", [asyncio.Event(), object()])
def test_run_refuses_a_stop_that_a_thread_cannot_wait_for(stop: Any) -> None:  # noqa: ANN401 - wrong types
    """The leader would never stop."""
    client, backend = scripted()

    with pytest.raises(ConfigurationError, match=r"takes a threading\.Event as stop, not (asyncio|builtins)\."):
        client.election("x").run(lambda _: None, stop=stop)

    assert backend.calls == []
    client.close()


def test_async_run_refuses_what_would_block_the_event_loop() -> None:
    """Waiting for an event of threads stops every task of the loop, also the one that would set it."""
    stop: Any = threading.Event()
    stop.set()  # so that this test does not hang if the event is waited for

    async def main() -> None:
        async with lockkit.aio.connect("memory://election-stop") as client:
            election = client.election("x")
            with pytest.raises(ConfigurationError, match=r"takes an asyncio\.Event as stop, not threading\.Event"):
                await election.run(lambda _: asyncio.sleep(0), stop)
            nothing: Any = None
            with pytest.raises(ConfigurationError, match=r"the function that does the leader's work, not None"):
                await election.run(nothing)

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


def test_cancellation_by_others_stays_one() -> None:
    """Also when the term ends in the same instant."""

    async def main() -> None:
        client, _ = scripted(AsyncioRuntime())
        entered = asyncio.Event()

        async def body() -> None:
            async with client.election("x").campaign(cancel_on_stop=True):
                entered.set()
                await asyncio.sleep(PATIENCE)

        task = asyncio.create_task(body())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await client.holders("x") == []
        await client.close()

    asyncio.run(main())


def test_loss_that_the_body_does_not_notice_raises_at_its_end() -> None:
    """As leaving a lock does."""
    client, _ = scripted()
    with pytest.raises(LockLost), client.election("x").campaign() as term:  # noqa: PT012 - as above
        client.break_lock("x")
        client._engine.confirm_soon()
        assert term.wait_lost(PATIENCE)
    client.close()


# -- who leads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "10.0.0.7:80", {"host": "a", "ports": [1, 2]}, 7, ""])
def test_leader_shows_the_value(value: object) -> None:
    """With owner and term of its lease."""
    client, _ = scripted()
    contest = client.election("x", value=value)
    assert contest.leader() is None
    with contest.campaign() as term:
        leader = contest.leader()

    assert (leader.owner, leader.term, leader.value) == (term.owner, term.token, value)
    assert leader.metadata == term.metadata
    client.close()


def test_leader_shows_the_text_of_a_foreign_client() -> None:
    """What etcdctl or kazoo stored; but not the text of a lock of lockkit's, which is another thing."""
    client, _ = scripted()
    contest = client.election("x")
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


def test_observer_reports_each_change_once_and_never_an_older_term(caplog: pytest.LogCaptureFixture) -> None:
    """A member that lags behind answers with an older leader: ignored. An outage: waited for."""
    one, two, three = (Holder(f"owner{term}", term, None, {"value": term}) for term in (1, 2, 3))
    client, _ = scripted()
    serving(client, [None, None, one, one, two, one, DOWN, DOWN, one, two, DOWN, None, three, three])
    caplog.set_level(logging.WARNING, "lockkit")

    leaders = client.election("x", ttl=0.1).observe()
    seen = [next(leaders) for _ in range(5)]

    assert [leader and leader.term for leader in seen] == [None, 1, 2, None, 3]
    assert caplog.text.count("connection refused") == 2  # once for each outage
    assert caplog.text.count("ignored term 1, which is older than 2") == 1
    client.close()
    assert list(leaders) == []


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


def test_closing_the_client_ends_an_observer_that_waits() -> None:
    """At once, without an error."""
    client, _ = scripted()
    leaders = client.election("x").observe()
    assert next(leaders) is None
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.extend(leaders))
    thread.start()
    until(lambda: bool(client._engine.client.sleeping))
    client.close()
    thread.join(PATIENCE)

    assert not thread.is_alive()
    assert seen == []
    with pytest.raises(LockError, match="closed"):
        client.election("x")


def test_observer_raises_what_no_retry_can_fix() -> None:
    """Such as wrong credentials."""
    client, _ = scripted()
    serving(client, [ConfigurationError("wrong password")])
    with pytest.raises(ConfigurationError, match="wrong password"):
        next(client.election("x").observe())
    client.close()
