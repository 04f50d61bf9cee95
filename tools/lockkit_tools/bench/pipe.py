"""What a worker process says to the process that started it, and how it waits without blocking an event loop."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

from lockkit.runtime import drive


class ParentPipe:
    """The worker's end of the line to the process that started it."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        """Keep the file descriptors."""
        self._incoming = incoming
        self._outgoing = outgoing
        self._buffer = b""

    async def ready(self, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Say that this process is ready, and wait for the word to go; give what came with it."""
        self.send({"ready": data or {}})
        message: dict[str, Any] = (await self._receive())["go"]
        return message

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._outgoing, data) :]

    def job(self) -> dict[str, Any]:
        """Read the first message. Before any event loop runs."""
        return drive(self._receive())

    async def _receive(self) -> dict[str, Any]:
        while (end := self._buffer.find(b"\n")) < 0:
            await readable(self._incoming)
            chunk = os.read(self._incoming, 65536)
            if not chunk:
                message = "the parent has ended"
                raise EOFError(message)
            self._buffer += chunk
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        message_: dict[str, Any] = json.loads(line)
        return message_


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
