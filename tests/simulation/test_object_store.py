"""
Locks in an object store under random schedules of crashes, pauses, and messages that are lost, late or repeated.

Everything that decides is the code that users run: `lockkit.backends.object_store.backend`, and the engine above it.
The bucket is a model. Its ETag is a hash of the content, as S3's is: an object that is written twice with equal bytes
has the ETag that it had before. All: ``LOCKKIT_SIM_SEED=0-19999 pytest tests/simulation/test_object_store.py``.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from lockkit.backend import seconds_left
from lockkit.backends.object_store.backend import ObjectBackend
from lockkit.backends.object_store.record import Record, Version
from lockkit.backends.object_store.store import Store
from lockkit.errors import BackendUnavailable, LockError
from lockkit.units import Instant, Seconds
from lockkit_tools.simulation import (
    Clock,
    Fault,
    History,
    LockServer,
    Network,
    NoAnswer,
    Node,
    Process,
    Schedule,
    Simulation,
    Verdict,
    draw,
)
from lockkit_tools.simulation.history import Quiet
from lockkit_tools.simulation.redlock import Hosting
from tests.simulation.support import apart, judge_by_clients

SEEDS = "0-499"
PART = 250
REPEATED = 0.02
"""Share of writes that a proxy sends twice: the answer is that of the second, which finds the first."""
WALL_CLOCKS_WRONG = 1000.0
"""The clients' times of day are wrong by up to this, seconds. It must not matter."""

T = TypeVar("T")
R = TypeVar("R")

# A holder that forgets its lease is part of the schedules.
pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")


class Bucket(LockServer):
    """Objects, in the place of the lock server that the simulation knows."""

    def __init__(self, node: Node, network: Network, history: History, **options: Any) -> None:
        super().__init__(node, network, history, **options)
        self.objects: dict[str, bytes] = {}
        self.grants: list[tuple[str, int]] = []

    def get(self, name: str) -> tuple[bytes, Version] | None:
        """Read an object."""
        content = self.objects.get(name)
        return None if content is None else (content, {"e_tag": hashlib.sha256(content).hexdigest()})

    def put(self, name: str, content: bytes, expected: Version | None) -> Version | None:
        """Write an object if it has the expected ETag."""
        former = self.get(name)
        if expected != (former and former[1]):
            return None
        self.store(name, content)
        return {"e_tag": hashlib.sha256(content).hexdigest()}

    def store(self, name: str, content: bytes) -> None:
        """Take down a grant, and write."""
        owner, written = json.loads(self.objects.get(name, b"{}")).get("owner"), json.loads(content)
        if written["owner"] not in {None, owner}:
            self.grants.append((name, written["token"]))
        self.objects[name] = content

    def left(self, *, final: bool) -> Quiet:
        """See `LockServer.left`. Of no interest here: the ttl is counted by waiters."""
        return Quiet(self.node.world.now, final, (), ())


class SimulatedStore(Store):
    """One process's requests to the bucket."""

    def __init__(self, process: Process, bucket: Bucket, network: Network, timeout: Seconds) -> None:
        self.shown = "s3://simulated"
        self.loop: Any = SimpleNamespace(stop=lambda: None)
        self._process, self._bucket, self._network, self._timeout = process, bucket, network, timeout
        self._chance = process.world.chance(f"repeated writes of {process.name}")

    async def run(self, coroutine: Coroutine[Any, Any, T], answer_by: Instant = inf) -> T:
        """See `Store.run`. What is cancelled here may still be on its way."""
        task = self._process.start(coroutine, "call", awaited=True)
        try:
            ended = await task.join(seconds_left(answer_by, self._process.now()))
        finally:
            task.cancel()
        if not ended:
            raise BackendUnavailable("no answer in time")
        return task.result()

    async def run_each(
        self, work: Callable[[T], Coroutine[Any, Any, R]], items: Sequence[T], answer_by: Instant = inf
    ) -> list[R | BaseException]:
        """See `Store.run_each`. One after the other."""
        outcomes: list[R | BaseException] = []
        for item in items:
            try:
                outcomes.append(await self.run(work(item), answer_by))
            except LockError as error:
                outcomes.append(error)
        return outcomes

    async def read(self, name: str) -> tuple[bytes, Version] | None:
        """See `Store.read`."""
        return await self._ask(lambda: self._bucket.get(name))

    async def write(self, name: str, content: bytes, expected: Version | None) -> Version | None:
        """See `Store.write`."""
        times = 2 if self._chance.random() < REPEATED else 1
        return await self._ask(lambda: [self._bucket.put(name, content, expected) for _ in range(times)][-1])

    async def _ask(self, operation: Callable[[], T]) -> T:
        try:
            return await self._network.call(self._process, self._bucket.node, operation, self._timeout)
        except NoAnswer as error:
            failure = BackendUnavailable(str(error))
            failure.sent = "refused" not in str(error)
            raise failure from error


class ObjectsSimulation(Simulation):
    """A random schedule on a bucket."""

    def __init__(
        self, seed: int, *, bucket: type[Bucket] = Bucket, change: Callable[[ObjectBackend], object] = lambda _: None
    ) -> None:
        """Make the world of a seed; `change` makes a mutant of each backend."""
        self.change = change
        self.wall_clocks: list[Clock] = []
        super().__init__(schedule_of(seed), server=bucket, backend=self._connected)

    def _connected(self, process: Process, server: LockServer, network: Network, timeout: float) -> ObjectBackend:
        assert isinstance(server, Bucket)
        backend = ObjectBackend(SimulatedStore(process, server, network, timeout), Hosting(process))
        # The shortest ttl and the pause between two looks, in proportion.
        backend.capabilities = replace(backend.capabilities, min_ttl=0.01)
        backend.poll_seconds = self.schedule.ttl / 5  # type: ignore[misc]
        clock = Clock(rate=process.clock.rate, offset=1.7e9 + self.chance.uniform(-1, 1) * WALL_CLOCKS_WRONG)
        self.wall_clocks.append(clock)
        backend._clock_us = lambda: int(clock.read(process.world.now) * 1e6)
        self.change(backend)
        return backend

    def _apply(self, fault: Fault) -> None:
        if fault.kind == "clock jump":
            self.wall_clocks[fault.client].jump(fault.seconds)
        else:
            super()._apply(fault)

    def judge(self) -> Verdict:
        """Run it, and judge by what clients believed, and by the tokens in the bucket."""
        self.run()
        assert isinstance(self.server, Bucket)
        return judge_by_clients(self, self.server.grants)


def schedule_of(seed: int) -> Schedule:
    """Draw the schedule of a seed: without `break_lock`, which makes second holders, and a store loses no objects."""
    schedule = draw(seed)
    faults = tuple(
        fault._replace(variant=1.0) if fault.kind == "server restart" else fault for fault in schedule.faults
    )
    return replace(schedule, faults=tuple(fault for fault in faults if fault.kind != "break"))


@pytest.mark.timeout(600)
def test_no_two_holders_and_tokens_rise(seeds: range) -> None:
    """Whatever happens to messages and clients, and whatever their times of day are."""
    grants_count = 0
    for seed in apart(seeds):
        simulation = ObjectsSimulation(seed)
        verdict = simulation.judge()
        assert verdict, f"seed {seed}: {verdict}"
        assert isinstance(simulation.server, Bucket)
        grants_count += len(simulation.server.grants)

    assert grants_count > 3 * len(seeds)


# -- mutants -------------------------------------------------------------------------------------------------------


class Overwriting(Bucket):
    """Does not look at the condition."""

    def put(self, name: str, content: bytes, expected: Version | None) -> Version | None:
        """Write."""
        del expected
        found = self.get(name)
        return super().put(name, content, found and found[1])


def repeat_bytes(backend: ObjectBackend) -> None:
    """Write without a nonce: a renewal has the bytes of what it replaces."""
    write = backend._store.write

    async def write_bare(name: str, content: bytes, expected: Version | None) -> Version | None:
        return await write(name, json.dumps(json.loads(content) | {"nonce": ""}).encode(), expected)

    backend._store.write = write_bare  # type: ignore[method-assign]


def compare_clocks(backend: ObjectBackend) -> None:
    """Write the time of day, and compare it with that of the machine that reads it."""
    write, left = backend._store.write, backend._observed.left

    async def write_stamp(name: str, content: bytes, expected: Version | None) -> Version | None:
        stamp = f"{backend._clock_us()} {secrets.token_hex(8)}"
        return await write(name, json.dumps(json.loads(content) | {"nonce": stamp}).encode(), expected)

    def left_since_stamp(name: str, seen: Record, ttl: Seconds) -> Seconds:
        stamp, stamped, _ = seen.nonce.partition(" ")
        return ttl - (backend._clock_us() - int(stamp)) / 1e6 if stamped else left(name, seen, ttl)

    backend._store.write = write_stamp  # type: ignore[method-assign]
    backend._observed.left = left_since_stamp  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    "parts",
    [{"change": repeat_bytes}, {"change": compare_clocks}, {"bucket": Overwriting}],
    ids=["equal bytes", "another machine's clock", "no condition"],
)
def test_mutant_makes_second_holders(parts: dict[str, Any]) -> None:
    """Each rule is there for a reason."""
    for seed in apart(range(200)):
        verdict = ObjectsSimulation(seed, **parts).judge()
        assert verdict.word != "unknown", f"seed {seed}: {verdict}"
        if "exclusion" in {problem.check for problem in verdict.problems}:
            return

    pytest.fail("not found within 200 seeds")
