"""Contenders within one process: threads or tasks, whatever the subject's face is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

from lockkit.runtime import drive
from lockkit_tools.bench.adapters.base import Adapter

T = TypeVar("T")


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
