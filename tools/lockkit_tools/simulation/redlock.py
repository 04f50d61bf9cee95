"""
The nodes of a Redlock on simulated time: they do what the Lua scripts do, and the backend's own code asks them.

`lockkit.backends.redlock.backend` and its treatment of restarted nodes run unchanged; only the nodes and the
connections to them are models. That the scripts do what is modelled here is shown on real nodes in
``tests/backends/redlock/test_backend.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from lockkit.backend import LossReason, Request
from lockkit.backends.redlock.delayed_restart import AHEAD_MS_MAX
from lockkit.backends.redlock.network import Nodes
from lockkit.backends.redlock.nodes import Answer, Argument, LockKeys, NodeDown, Op
from lockkit.errors import BackendUnavailable, Unsupported
from lockkit.units import Instant, Seconds
from lockkit_tools.simulation.network import Network, NoAnswer, Node
from lockkit_tools.simulation.runtime import SimulatedRuntime
from lockkit_tools.simulation.world import Process, World

RESET = "the connection was ended by a restart"


SAVE_CHANCE = 0.02
"""How probably a node writes a snapshot after a command."""


class VotingNode:
    """One Redis node: its keys, and each Lua file as a method."""

    def __init__(self, world: World, index: int, *, rate: float, wall_offset: float, info: bool = True) -> None:
        self.node = Node(world, f"node{index}", rate=rate, wall_offset=wall_offset)
        self.node.stopped.append(self._stopped)
        self.run = 1
        self.saves = False  # when it loses data, it goes back to its last snapshot
        self._info = info
        self._chance = world.chance(f"snapshots of node{index}")
        self._forget()
        self._snapshot = self._data()

    def _forget(self) -> None:
        self._strings: dict[tuple[str, str], tuple[str, float]] = {}
        self._fences: dict[str, int] = {}
        self.mark: dict[str, int] | None = None

    def _data(self) -> tuple[dict[tuple[str, str], tuple[str, float]], dict[str, int], dict[str, int] | None]:
        return dict(self._strings), dict(self._fences), None if self.mark is None else dict(self.mark)

    def _stopped(self, lose_data: bool) -> None:  # noqa: FBT001 - as Node says it
        self.run += 1
        if lose_data and self.saves:
            self._strings, self._fences, self.mark = self._snapshot
            self._snapshot = self._data()
        elif lose_data:
            self._forget()

    def _is_marked(self) -> bool:
        """Whether there is a mark of the present run, as far as a client can tell."""
        return self.mark is not None and (self.mark["run"] == self.run or not self._info)

    def execute(self, run: int, op: Op, lock: str, arguments: Sequence[Argument]) -> Answer | str:
        """Do what came by a connection that was opened in a certain run of this server."""
        if run != self.run:
            return RESET
        method: Callable[..., Answer] = getattr(self, op.name)
        answer = method(lock, *arguments)
        if self._chance.random() < SAVE_CHANCE:
            self.save()
        return answer

    def save(self) -> None:
        """Write a snapshot."""
        self._snapshot = self._data()

    def _get(self, what: str, lock: str) -> str | None:
        value, until = self._strings.get((what, lock), (None, 0.0))
        return value if until > self.node.now() else None

    def _left_ms(self, lock: str) -> int:
        return math.ceil((self._strings["lock", lock][1] - self.node.now()) * 1000)

    def _set(self, what: str, lock: str, value: str, ttl_ms: int) -> None:
        self._strings[what, lock] = value, self.node.now() + ttl_ms / 1000

    def _delete(self, lock: str) -> None:
        del self._strings["lock", lock]

    def acquire(self, lock: str, value: str, ttl_ms: int, *others: Argument) -> Answer:
        _, _, proposed, _ = others
        mark = self.mark
        if mark is None or not self._is_marked():
            return [-1]
        wait_us = mark["until_us"] - self.node.wall_us()
        if wait_us > 0:
            return [-2, math.ceil(wait_us / 1000)]
        holder = self._get("lock", lock)
        if holder is not None:
            return [0, self._left_ms(lock), holder.encode(), 0]
        mark["ttl_ms"] = max(mark["ttl_ms"], ttl_ms)
        self._set("lock", lock, value, ttl_ms)
        now_us = self.node.wall_us()
        lowest = max(self._fences.get(lock, 0) + 1, now_us)
        token = lowest if proposed == "" else int(proposed)
        if not lowest <= token <= max(lowest, now_us + AHEAD_MS_MAX * 1000):
            return lowest
        self._fences[lock] = token
        return token

    def fence(self, lock: str, value: str, token: int, fence_ms: int, metadata: str) -> Answer:
        del fence_ms, metadata
        if self._get("lock", lock) != value:
            return 0
        self._fences[lock] = max(self._fences.get(lock, 0), token)
        return 1

    def renew(self, lock: str, value: str, ttl_ms: int, fence_ms: int) -> Answer:
        del fence_ms
        holder = self._get("lock", lock)
        if holder == value:
            self._set("lock", lock, value, ttl_ms)
            if self.mark is not None:
                self.mark["ttl_ms"] = max(self.mark["ttl_ms"], ttl_ms)
            return 1
        return 0 if holder is None else -1

    def release(self, lock: str, value: str) -> Answer:
        if self._get("lock", lock) != value:
            return 0
        self._delete(lock)
        return 1

    undo = release

    def holders(self, lock: str) -> Answer:
        holder = self._get("lock", lock)
        if holder is None:
            return []
        return [holder.encode(), self._left_ms(lock), str(self._fences.get(lock, "")).encode(), b"", 0]

    def look(self, lock: str) -> Answer:
        del lock
        mark = self.mark
        if mark is None:
            return [0, 0, 0, 0, str(self.run).encode()]
        now_us = self.node.wall_us()
        wait_ms, run = max(0, math.ceil((mark["until_us"] - now_us) / 1000)), str(self.run).encode()
        return [1 if self._is_marked() else 2, wait_ms, mark["ttl_ms"], (now_us - mark["since_us"]) // 1000, run]

    def admit(self, lock: str, wait_ms: int, ttl_ms: int, looked_at: bytes) -> Answer:
        del lock
        if self._is_marked() or looked_at not in {b"", str(self.run).encode()}:
            return 0
        known_ms = 0 if self.mark is None else self.mark["ttl_ms"]
        now_us = self.node.wall_us()
        self.mark = {
            "run": self.run, "ttl_ms": max(known_ms, ttl_ms), "since_us": now_us, "until_us": now_us + wait_ms * 1000,
        }  # fmt: skip
        return 1


class SimulatedNodes(Nodes):
    """One process's connections to the nodes. A message is lost or late as the network has it; nobody is woken."""

    def __init__(self, process: Process, nodes: Sequence[VotingNode], network: Network, timeout: Seconds) -> None:
        self.labels = [node.node.name for node in nodes]
        self._process = process
        self._nodes = nodes
        self._network = network
        self._timeout = timeout
        self._runs = [node.run for node in nodes]

    async def ask(
        self,
        op: Op,
        keys: LockKeys,
        arguments: Sequence[Argument],
        *,
        last_arguments: Sequence[Argument] | None = None,
        only: Collection[int] | None = None,
        send_later_seconds: float = 0.0,
        until: Instant = math.inf,
    ) -> list[Answer]:
        answers: list[Answer] = [None] * len(self._nodes)
        tasks = {}
        for index in range(len(self._nodes)) if only is None else only:
            values = arguments if last_arguments is None else [*arguments, last_arguments[index]]
            call = self._ask_one(index, op, keys.lock, values, until)
            tasks[index] = self._process.start(call, f"ask {op.name} {index}", awaited=True)
        for index, task in tasks.items():
            await task.join()
            answers[index] = task.result()
            if send_later_seconds and isinstance(answers[index], BackendUnavailable):
                values = arguments if last_arguments is None else [*arguments, last_arguments[index]]
                self._process.start(self._flush(index, op, keys.lock, values, send_later_seconds), "flush")
        return answers

    async def _ask_one(
        self, index: int, op: Op, lock: str, arguments: Sequence[Argument], until: Instant = math.inf
    ) -> Answer:
        node, run = self._nodes[index], self._runs[index]
        timeout = max(0.0, min(self._timeout, until - SimulatedRuntime(self._process).now()))
        try:
            answer = await self._network.call(
                self._process, node.node, lambda: node.execute(run, op, lock, arguments), timeout
            )
        except NoAnswer as error:
            unavailable = BackendUnavailable(str(error))
            # Refused: nothing was sent.
            return NodeDown(unavailable) if "refused" in str(error) else unavailable
        if answer is RESET:
            # The connection is opened anew, which is when the node's run is learnt.
            self._runs[index] = node.run
            return NodeDown(BackendUnavailable(RESET))
        return answer  # type: ignore[return-value]  # no other str

    async def _flush(self, index: int, op: Op, lock: str, arguments: Sequence[Argument], seconds: float) -> None:
        """Ask again until there is an answer."""
        runtime = SimulatedRuntime(self._process)
        until = runtime.now() + seconds
        while runtime.now() < until:
            await runtime.sleep(runtime.random.uniform(0.01, 0.3))
            if not isinstance(await self._ask_one(index, op, lock, arguments), BackendUnavailable):
                return

    async def ask_many(
        self,
        op: Op,
        calls: Sequence[tuple[LockKeys, Sequence[Argument]]],
        *,
        until: Instant = math.inf,
        last: bool = False,
    ) -> list[list[Answer]]:
        del last
        by_call = [await self.ask(op, keys, arguments, until=until) for keys, arguments in calls]
        return [list(answers) for answers in zip(*by_call, strict=True)]

    def queue_entries(self, request: Request) -> list[str]:
        raise NotImplementedError

    async def listen(self, until: Instant) -> bool:
        del until
        return False

    def forget(self, request: Request) -> None:
        """See `Nodes.forget`."""

    async def erase(self, prefix: str) -> None:
        raise Unsupported(f"a simulated node ends with its world, and {prefix!r} with it")

    async def close(self) -> None:
        """See `Nodes.close`."""


class Hosting:
    """The engine's side, as far as the backend needs it here."""

    def __init__(self, process: Process) -> None:
        self.runtime = SimulatedRuntime(process)

    def lost(self, owner: str, reason: LossReason) -> None:
        """See `lockkit.backend.Host.lost`. Not used by this backend."""
        raise NotImplementedError

    def confirm_soon(self) -> None:
        """See `lockkit.backend.Host.confirm_soon`."""
