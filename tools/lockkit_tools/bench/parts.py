"""What the part of a workload that runs in a worker needs: the pipe to its parent, contenders, a clock and samples."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeVar

from lockkit.runtime import drive
from lockkit_tools.bench.adapters.base import Adapter

T = TypeVar("T")

now_ns = time.monotonic_ns
"""The machine's monotonic clock: the same for all its processes, so that times of two of them may be compared."""


def spread(samples_ns: Sequence[int], unit: str) -> dict[str, float]:
    """Summarise samples: how many, minimum, quartiles, p90, p99 and maximum."""
    scale = {"us": 1e3, "ms": 1e6}[unit]
    # One sample has no quantiles; `inclusive`, because the samples are all there is, not drawn from more.
    cuts = statistics.quantiles(samples_ns, n=100, method="inclusive") if len(samples_ns) > 1 else [samples_ns[0]] * 99
    return {
        "count": len(samples_ns),
        f"min_{unit}": min(samples_ns) / scale,
        f"p25_{unit}": cuts[24] / scale,
        f"median_{unit}": cuts[49] / scale,
        f"p75_{unit}": cuts[74] / scale,
        f"p90_{unit}": cuts[89] / scale,
        f"p99_{unit}": cuts[98] / scale,
        f"max_{unit}": max(samples_ns) / scale,
    }


class ParentPipe:
    """The worker's end of the line to the process that started it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def ready(self) -> dict[str, Any]:
        """Say that this process is ready, and wait for the word to go; give what came with it."""
        self.send({"ready": {}})
        await readable(self._connection.fileno())
        message: dict[str, Any] = self._connection.recv()["go"]
        return message

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        self._connection.send(message)

    def job(self) -> dict[str, Any]:
        """Read the first message. Before any event loop runs."""
        job: dict[str, Any] = self._connection.recv()
        return job


async def readable(fd: int) -> None:
    """Wait until a file descriptor can be read; without blocking the event loop, where there is one."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return  # the read blocks this thread
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


async def run_contenders(adapter: Adapter, contenders: Sequence[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Run coroutine functions side by side: in threads, or as tasks. One alone runs where the caller runs."""
    if len(contenders) == 1:
        return [await contenders[0]()]
    if adapter.face == "asyncio":
        return await asyncio.gather(*(contender() for contender in contenders))
    results: dict[int, T] = {}
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(index: int, contender: Callable[[], Coroutine[Any, Any, T]]) -> None:
        try:
            results[index] = drive(contender())
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            ended.put(error)
        else:
            ended.put(None)

    for index, contender in enumerate(contenders):
        threading.Thread(target=run, args=(index, contender), daemon=True).start()
    for _ in contenders:
        if (error := ended.get()) is not None:
            raise error
    return [results[index] for index in range(len(contenders))]


async def enter(adapter: Adapter, lock: Any) -> Any:  # noqa: ANN401 - what the library gives
    """Enter a lock of either face."""
    return await lock.__aenter__() if adapter.face == "asyncio" else lock.__enter__()


async def leave(adapter: Adapter, lock: Any) -> None:  # noqa: ANN401 - the library's
    """Leave a lock of either face."""
    if adapter.face == "asyncio":
        await lock.__aexit__(None, None, None)
    else:
        lock.__exit__(None, None, None)


async def pause(adapter: Adapter, seconds: float) -> None:
    """Sleep; other tasks of an event loop run meanwhile."""
    if adapter.face == "asyncio":
        await asyncio.sleep(seconds)
    else:
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop here: that is what the face says


async def idle_percent(adapter: Adapter, seconds: float) -> float:
    """Let the process wait, and give its CPU time as percents of one core."""
    cpu, began = time.process_time(), time.monotonic()
    await pause(adapter, seconds)
    return 100 * (time.process_time() - cpu) / (time.monotonic() - began)
