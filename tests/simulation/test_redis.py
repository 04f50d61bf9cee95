"""The simulated Redis does what the Lua scripts do on a real one, and the backend's own code locks with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lockkit
from lockkit.aio import Client, Lease
from lockkit.backends.redis.backend import RedisBackend
from lockkit.backends.redis.keys import lock_key, side_key
from lockkit.backends.redis.script import Script
from lockkit.errors import Unsupported
from lockkit_tools.servers import RedisServer, require
from lockkit_tools.simulation import Network, Process, SimulatedRuntime, World
from lockkit_tools.simulation.backend import client_of
from lockkit_tools.simulation.redis import DEFAULTS, RedisModel, SimulatedListener, SimulatedTopology

LOCK = lock_key("lockkit", "report")
KEYS = {
    "acquire": ("", "fence", "queue", "shares", "leases"),
    "release": ("", "fence", "queue", "shares", "leases"),
    "abandon": ("", "fence", "queue", "shares", "leases"),
    "renew": ("", "fence", "broken", "shares", "leases"),
    "holders": ("", "fence", "queue", "shares", "leases"),
}
OWNERS = ("one", "two", "three")
# Long enough for every example: what ends by itself is not compared here.
TTL_MS, GRACE_MS = "600000", "300000"


@pytest.fixture(scope="module")
def real() -> Iterator[redis.Redis]:
    """Start a server of this file's own, to which the clients of all owners but the last are subscribed."""
    require("redis", local=True)
    with RedisServer() as server:
        client = redis.Redis.from_url(server.url)
        subscription = client.pubsub()  # type: ignore[no-untyped-call]
        subscription.subscribe(*(f"wake:{owner}" for owner in OWNERS[:-1]))
        for _ in OWNERS[:-1]:
            assert subscription.get_message(timeout=30) is not None
        yield client
        subscription.close()
        client.close()


def words_of(name: str, owner: str, *, waits: bool) -> list[str]:
    """Return the arguments of a script, without its keys."""
    entry = f"{GRACE_MS} wake:{owner}" if waits else ""
    return {
        "acquire": [owner, TTL_MS, f'{{"of": "{owner}"}}', TTL_MS, entry, ""],
        "release": [owner, "gone"],
        "abandon": [owner, f"{GRACE_MS} wake:{owner}"],
        "renew": [owner, TTL_MS, TTL_MS, "gone"],
        "holders": [],
    }[name]


def keys_of(name: str) -> list[str]:
    """Return the keys of a script."""
    return [side_key(LOCK, what) if what else LOCK for what in KEYS[name]]


def comparable(name: str, reply: Any) -> object:  # noqa: ANN401 - any reply
    """Return what of a reply does not depend on the time."""
    if name == "acquire":
        return "token" if isinstance(reply, int) else tuple(reply[1:])
    if name == "holders" and reply:
        owner, _, token, metadata, waiters = reply
        return owner, bool(token), metadata, waiters
    return tuple(reply) if isinstance(reply, list) else reply


# Besides the scripts: the lock's key expires, and a client of another kind takes it.
OPERATIONS = st.lists(
    st.tuples(st.sampled_from([*sorted(KEYS), "expire", "foreign"]), st.sampled_from(OWNERS), st.booleans()),
    max_size=25,
)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(operations=OPERATIONS)
def test_model_answers_as_the_scripts_do(real: redis.Redis, operations: Sequence[tuple[str, str, bool]]) -> None:
    """The same calls in the same order, at both: the same replies, and tokens that increase."""
    real.flushall()
    world = World(1)
    model = RedisModel(world, "redis", Network(world))
    for owner in OWNERS[:-1]:
        model.subscribe(SimulatedListener(world.process(owner)))
    tokens: list[int] = []

    for name, owner, waits in operations:
        if name == "expire":
            real.delete(LOCK)
            model.drop(LOCK)
            continue
        if name == "foreign":
            if real.set(LOCK, name, nx=True, px=int(TTL_MS)):
                model.put(LOCK, name, int(TTL_MS) / 1000)
            continue
        keys, words = keys_of(name), words_of(name, owner, waits=waits)
        script = Script(name, keys=keys, arguments=len(words))
        expected = real.eval(script.text, len(keys), *keys, *words)
        reply = model.execute(name, [*keys, *words])
        assert comparable(name, reply) == comparable(name, expected), (name, owner)
        if name == "acquire" and isinstance(reply, int):
            tokens.append(reply)

    assert tokens == sorted(set(tokens))
    world.end()


def connect(process: Process, model: RedisModel, network: Network, **options: Any) -> Client:
    """Make a client of the simulated server, with the backend's own code."""
    topology = SimulatedTopology(process, lambda: model, network)
    return client_of(
        process, lambda host: RedisBackend("redis://simulated", topology, {**DEFAULTS, **options}, host), ttl=10.0
    )


def test_waiters_are_served_in_order_and_woken() -> None:
    """Three clients hold it one after the other, in the order in which they came, without polling."""
    world = World(1)
    network = Network(world)
    model = RedisModel(world, "redis", network)
    held: list[tuple[str, float]] = []

    async def work(process: Process, start: float) -> None:
        runtime = SimulatedRuntime(process)
        await runtime.sleep(start)
        async with connect(process, model, network).lock("x"):
            held.append((process.name, world.now))
            await runtime.sleep(5.0)

    for index in range(3):
        process = world.process(f"client{index}")
        process.start(work(process, 0.1 * index), "work")
    world.run(until=60.0)
    world.end()

    assert not world.failures
    assert [name for name, _ in held] == ["client0", "client1", "client2"]
    assert all(later - earlier < 5.1 for (_, earlier), (_, later) in itertools.pairwise(held))


def test_grant_that_no_replica_confirms_is_undone() -> None:
    """With replicas=1 and stalled replication nobody gets the lock, and nothing is left of the try."""
    world = World(1)
    network = Network(world)
    master, replica = (RedisModel(world, name, network) for name in ("master", "replica"))
    master.replicas.append(replica)
    replica.lag = float("inf")
    process = world.process("client")
    errors: list[type[BaseException]] = []
    leases: list[Lease] = []

    async def work() -> None:
        lock = connect(process, master, network, replicas=1).lock("report")
        try:
            await lock.acquire(1.0)
        except lockkit.LockTimeout as error:
            errors.append(type(error))
        replica.lag = 0.001
        leases.append(await lock.acquire(5.0))

    task = process.start(work(), "work")
    world.run(task=task)
    kept = replica.get(LOCK)
    world.end()

    assert errors == [lockkit.LockTimeout]
    assert kept == leases[0].owner


def test_readers_are_refused_and_not_guessed() -> None:
    """What is not modelled is an error."""
    world = World(1)
    model = RedisModel(world, "redis", Network(world))

    with pytest.raises(Unsupported, match="no readers"):
        model.execute("acquire", [*keys_of("acquire"), "one", TTL_MS, "{}", TTL_MS, "", "0"])
