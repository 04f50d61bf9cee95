"""
Sessions on simulated time: clients that pause and messages that come late, against a model of ``session.lua``.

The client's code is the real one. After each operation of the server, and in between, every lease that its holder
believes in must be held at the server.
"""

from __future__ import annotations

import json
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, cast

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lockkit
from lockkit.backends.redis import sessions
from lockkit.backends.redis.backend import RedisBackend
from lockkit.backends.redis.keys import lock_key, side_key
from lockkit.backends.redis.script import Script
from lockkit.engine.lease_record import HELD
from lockkit.simulation import Conditions, Network, SimulatedRuntime, World
from lockkit.simulation.backend import client_of
from lockkit.simulation.redis import DEFAULTS, RedisModel, SimulatedTopology, _words
from lockkit.testing.servers import RedisServer, require
from tests.simulation.test_redis import LOCK, OWNERS, TTL_MS, comparable, keys_of, words_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lockkit.aio import Lease
    from lockkit.backends.redis.resp import Reply
    from lockkit.backends.redis.script import Command
    from lockkit.simulation import Process
    from lockkit.units import Instant

NAMES = ("a", "b", "c", "d", "e")
TTLS = (2.0, 2.0, 2.0, 4.0)
FORM = "lockkit:session "
BAD = Conditions(requests_lost=0.03, answers_lost=0.03, slow=0.1, slow_max=5.0)


class SessionModel(RedisModel):
    """
    A Redis with sessions.

    Attributes:
        identity: Changes with each restart.
        changed: Called after each operation.
    """

    identity = 0
    changed: Callable[[], object] = staticmethod(lambda: None)
    ignores_numbers = False

    def get(self, key: str) -> str | None:
        """Give a value as ``holder.lua`` does: of a lease in a session, its owner while there is the session."""
        value = super().get(key)
        if value is None or not value.startswith(FORM):
            return value
        _, _, owner, session = value.split(" ", 3)
        return owner if not session or super().get(session) is not None else None

    def left_ms(self, key: str) -> int:
        """Give how long a lease lasts."""
        value = super().get(key) or ""
        session = value.split(" ", 3)[3] if value.startswith(FORM) else ""
        left_ms = super().left_ms(key)
        return min(left_ms, super().left_ms(session)) if session else left_ms

    def execute(self, script: str, words: Sequence[str]) -> Reply:
        """Run a Lua file."""
        reply = super().execute(script, words)
        self.changed()
        return reply

    def release(self, keys: Sequence[str], arguments: Sequence[str]) -> Reply:
        """See ``release.lua``: it also removes a lock whose session has ended."""
        value = RedisModel.get(self, keys[0]) or ""
        if value.startswith(FORM) and value.split(" ", 3)[2] == arguments[0] and self.get(keys[0]) is None:
            self._pass_on(keys[0], keys[2])
            return 0
        return super().release(keys, arguments)

    def session(self, words: Sequence[str]) -> Reply:
        """See ``session.lua``."""
        session, ttl_ms, makes, read, keep_ms, _, _, coming, going = words
        value = self.get(session)
        if value is None and makes != "1":
            return [0]
        value = value or ""
        self.put(session, value, int(ttl_ms) / 1000)
        reply: list[Any] = [1, b"%d" % self.identity, value[int(read) :].encode()]
        entering, leaving = json.loads(coming), json.loads(going)
        for lock, owner, number in zip(*[iter(entering)] * 3, strict=True):
            reply.append(self._move(session, (lock, owner, number), session, int(keep_ms)))
        for lock, owner, number, left_ms in zip(*[iter(leaving)] * 4, strict=True):
            reply.append(self._move(session, (lock, owner, number), "", left_ms))
        self.changed()
        return reply

    def _move(self, session: str, lease: tuple[str, str, int], to: str, ms: int) -> int:
        lock, owner, number = lease
        value = RedisModel.get(self, lock)
        if value != owner:
            _, last, of, before = value.split(" ", 3) if value and value.startswith(FORM) else ("", "", "", "")
            if of != owner:
                broken = RedisModel.get(self, side_key(lock, "broken")) or ""
                return -2 if owner in broken.split() else 0 if value is None else -1
            if int(last) > number and not self.ignores_numbers:
                return -3
            if before and before != session and RedisModel.get(self, before) is None:
                return -4
        self.put(lock, f"{FORM}{number} {owner} {to}", ms / 1000)
        return 1

    def break_lock(self, lock: str) -> str | None:
        """See ``break.lua``."""
        owner, value = self.get(lock), RedisModel.get(self, lock) or ""
        if owner is None or owner.startswith("next:"):
            if value.startswith(FORM):
                self.drop(lock)
            return None
        session = value.split(" ", 3)[3] if value.startswith(FORM) else ""
        self.drop(lock)
        self.put(side_key(lock, "broken"), owner, 60.0)
        if session:
            said, until = self.strings[session]
            self.strings[session] = f"{said}{owner} ", until
        return owner


class SessionTopology(SimulatedTopology):
    """The connections to such a server."""

    has_sessions = True

    async def run(
        self, script: Command, key: str, body: bytes, /, *, resend: bool = False, answer_by: Instant = inf
    ) -> Reply:
        """See `Topology.run`."""
        if script is not sessions._SESSION:
            return await super().run(script, key, body, resend=resend, answer_by=answer_by)
        words = _words(body)
        reply: Reply = await self._call(lambda model: cast("SessionModel", model).session(words), answer_by)
        return reply


class Story:
    """
    Some clients, a server, and what befalls them.

    Attributes:
        world: Where.
        model: The server.
        wrong: What a holder believed that was not so.
        in_session: How many leases were in a session.
    """

    def __init__(self, seed: int, kind: str, model: type[SessionModel] = SessionModel) -> None:
        """Set the stage; `kind` says what the option ``leases`` of each client is."""
        self.world = World(seed)
        self.network = Network(self.world, BAD)
        self.model = model(self.world, "redis", self.network)
        self.model.changed = self.look
        self.wrong: list[str] = []
        self.in_session: set[str] = set()
        self._leases: list[tuple[Process, Lease]] = []
        self._excused: dict[str, float] = {}
        self._restarted = -inf
        self._chance = self.world.chance("story")
        self._past: list[dict[str, tuple[str, float]]] = []
        self._processes = [
            self.world.process(f"client{index}", rate=self._chance.uniform(0.996, 1.004), offset=1000.0 * index)
            for index in range(4)
        ]
        for index, process in enumerate(self._processes):
            self._connect(process, "lease" if kind == "lease" or (kind == "mixed" and index % 2) else "session")

    def _connect(self, process: Process, leases: str) -> None:
        topology = SessionTopology(process, lambda: self.model, self.network)
        options = {**DEFAULTS, "leases": leases}
        client = client_of(process, lambda host: RedisBackend("redis://simulated", topology, options, host), ttl=2.0)
        for index in range(3):
            process.start(self._work(process, client), f"work{index}")

    async def _work(self, process: Process, client: lockkit.aio.Client) -> None:
        sleep, chance = SimulatedRuntime(process).sleep, self._chance
        for _ in range(8):
            hold = chance.choice((None, None, 3.0))
            lock = client.lock(
                chance.choice(NAMES), ttl=chance.choice(TTLS), max_hold=hold, renew=chance.random() < 0.9
            )
            try:
                lease = await lock.acquire(chance.uniform(0.0, 8.0))
            except lockkit.LockError:
                continue
            self._leases.append((process, lease))
            for _ in range(3):
                await sleep(chance.uniform(0.0, 3.0))
                if chance.random() < 0.3:
                    with suppress(lockkit.LockError):
                        await lease.extend(chance.choice((1.0, 2.0, 4.0)))
            if hold is None:
                with suppress(lockkit.LockError):
                    await lease.release()

    def run(self) -> None:
        """Let two minutes pass."""
        world, chance = self.world, self._chance
        for tick in range(1200):
            world.call_at(0.1 * tick, self._tick)
        for _ in range(25):
            world.call_at(
                chance.uniform(1.0, 100.0), chance.choice((self._pause, self._cut, self._break, self._restart))
            )
        world.run(until=120.0)
        world.end()
        assert not world.failures, world.failures

    def _tick(self) -> None:
        self.look()
        self._past = [*self._past[-9:], dict(self.model.strings)]

    def look(self) -> None:
        """Compare what the holders believe with what is so."""
        now = self.world.now
        for process, lease in self._leases:
            record, lock = lease._record, lock_key("lockkit", lease.name)
            if record.state is not HELD or process.now() >= record.valid_until:
                continue
            if (RedisModel.get(self.model, lock) or "").startswith(FORM):
                self.in_session.add(lease.owner)
            asked = now - (process.now() - record.since) / process.clock.rate
            excused = max(self._excused.get(lease.owner, -inf), self._restarted if asked <= self._restarted else -inf)
            if self.model.get(lock) != lease.owner and now > excused + max(TTLS) * 1.02:
                self.wrong.append(f"{process.name} believes in {lease!r} at {now:.3f}")

    def _excuse(self, *owners: str) -> None:
        """A holder whose lease was broken, or lost by the server, learns it within its ttl."""
        self._excused.update(dict.fromkeys(owners, self.world.now))

    def _pause(self) -> None:
        process = self._chance.choice(self._processes)
        process.pause()
        self.world.call_in(self._chance.uniform(0.5, 5.0), process.resume)

    def _cut(self) -> None:
        process = self._chance.choice(self._processes)
        self.network.cut(process, self.model.node, requests=self._chance.random() < 0.5)
        self.world.call_in(self._chance.uniform(0.5, 4.0), self.network.heal, process, self.model.node)

    def _break(self) -> None:
        broken = self.model.break_lock(lock_key("lockkit", self._chance.choice(NAMES)))
        self._excuse(*([broken] if broken else []))

    def _restart(self) -> None:
        """With the data of up to a second ago: leases and heartbeats since then are lost."""
        self.model.strings = dict(self._past[self._chance.randrange(len(self._past))])
        self.model.identity += 1
        self._restarted = self.world.now


@pytest.mark.parametrize("kind", ["session", "mixed"])
@pytest.mark.parametrize("first", range(0, 24, 6))
@pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")
def test_holders_are_right(first: int, kind: str) -> None:
    """In every schedule, a client that believes that it holds a lock holds it."""
    in_session = 0
    for seed in range(first, first + 6):
        story = Story(seed, kind)
        story.run()
        assert not story.wrong, (seed, story.wrong[:3])
        in_session += len(story.in_session)
    assert in_session >= 60, "too few leases were in a session for this to show anything"


class LateRequestsCount(SessionModel):
    """A server that does not compare the numbers of requests."""

    ignores_numbers = True


class OneIdentity(SessionModel):
    """A server whose restarts cannot be told."""

    def session(self, words: Sequence[str]) -> Reply:
        """See ``session.lua``."""
        reply = cast("list[Any]", super().session(words))
        return [*reply[:1], b"same", *reply[2:]] if reply[0] else reply


class EarlyEnd(SessionModel):
    """A server that gives locks away a little before their session ends."""

    def get(self, key: str) -> str | None:
        """See ``holder.lua``."""
        value = RedisModel.get(self, key) or ""
        session = value.split(" ", 3)[3] if value.startswith(FORM) else ""
        ends = bool(session) and RedisModel.get(self, session) is not None and RedisModel.left_ms(self, session) < 300
        return None if ends else super().get(key)


@pytest.mark.parametrize("model", [LateRequestsCount, OneIdentity, EarlyEnd])
@pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")
def test_what_the_rules_are_for(model: type[SessionModel]) -> None:
    """Without one of them, a holder is wrong in some schedule."""
    for seed in range(40):
        story = Story(seed, "session", model)
        story.run()
        if story.wrong:
            return
    pytest.fail("no schedule shows it")


# An attempt is abandoned only if it was not granted, so never once its lease is in a session.
SESSIONS = ("lockkit+session:1", "lockkit+session:2")
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "release", "holders", "come", "come", "come", "go", "beat", "end", "break"]),
        st.sampled_from(OWNERS),
        st.integers(0, 3),
    ),
    max_size=25,
)


@pytest.fixture(scope="module")
def real() -> Iterator[redis.Redis]:
    """Start a server of this file's own."""
    require("redis", local=True)
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:
        yield client


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(operations=OPERATIONS)
def test_model_answers_as_the_scripts_do(real: redis.Redis, operations: Sequence[tuple[str, str, int]]) -> None:
    """The same calls in the same order, at both: the same replies."""
    real.flushall()
    world = World(1)
    model = SessionModel(world, "redis", Network(world))

    for count, (name, owner, choice) in enumerate(operations):
        session = SESSIONS[choice % 2]
        if name == "end":
            real.delete(session)
            model.drop(session)
        elif name == "break":
            keys = [LOCK, *(side_key(LOCK, what) for what in ("fence", "broken", "queue", "shares", "leases"))]
            broken = Script("break", keys=keys, arguments=1)
            expected = real.eval(broken.text, 6, *keys, TTL_MS)
            assert expected == (model.break_lock(LOCK) is not None)
        elif name in {"come", "go", "beat"}:
            # Some requests come late.
            lease = [LOCK, owner, max(1, count - choice)]
            lists = [lease, []] if name == "come" else [[], [*lease, int(TTL_MS)]] if name == "go" else [[], []]
            makes = int(name == "come" and choice < 3)
            words = [session, TTL_MS, str(makes), "0", TTL_MS, TTL_MS, "gone", *map(json.dumps, lists)]
            expected = cast("list[Any]", real.eval(sessions._SESSION.text, 1, *words))
            reply = cast("list[Any]", model.session(words))
            assert reply[:1] + reply[2:] == expected[:1] + expected[2:], (name, owner)
        else:
            keys, words = keys_of(name), words_of(name, owner, waits=False)
            expected = real.eval(Script(name, keys=keys, arguments=len(words)).text, len(keys), *keys, *words)
            assert comparable(name, model.execute(name, [*keys, *words])) == comparable(name, expected), (name, owner)
    world.end()
