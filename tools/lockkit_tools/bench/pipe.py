"""What a worker process says to the process that started it, and how it waits without blocking an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any


class ParentPipe:
    """The worker's end of the line to the process that started it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def ready(self, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Say that this process is ready, and wait for the word to go; give what came with it."""
        self.send({"ready": data or {}})
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
