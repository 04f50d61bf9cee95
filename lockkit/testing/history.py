"""
Histories for other people's checkers: the calls of a run in the operation format of Jepsen, one line each.

A call has a line when it begins and one when it has ended; without the second, nobody knows whether it happened::

    {:process 0, :type :invoke, :f :acquire, :value nil, :time 100, :lock "a"}
    {:process 0, :type :ok, :f :acquire, :value 7, :time 190, :lock "a"}

The value of an acquisition is its fencing token. `lockkit_tools.history` has the other half: it reads and checks them.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from lockkit import aio
from lockkit.runtime import monotonic

__all__ = ["FILE_VARIABLE", "encode", "recorded"]

FILE_VARIABLE = "LOCKKIT_TEST_HISTORY"
"""Names the file to which `recorded` appends, also in the processes that a case starts."""


def encode(operation: Mapping[str, object], path: str | os.PathLike[str]) -> str:
    """Write an operation as a line for a file: JSON if its name ends in ``.json``, else EDN."""
    if os.fspath(path).endswith(".json"):
        return json.dumps(operation) + "\n"
    words = {key: json.dumps(value) for key, value in operation.items()}
    words |= {key: f":{operation[key]}" for key in ("type", "f")}
    return "{" + ", ".join(f":{key} {'nil' if word == 'null' else word}" for key, word in words.items()) + "}\n"


@asynccontextmanager
async def recorded(process: int, lock: aio.Lock | aio.Semaphore, limit: int | None = None) -> AsyncIterator[aio.Lease]:
    """
    Enter a block under a lock or semaphore, and add its calls to the history, if one is kept.

    Lines of several processes are in a right order: one is written before a call begins, the other after it has ended.
    A lease that was lost, which fails the case, counts as held until its block ends.

    Args:
        process: Number of the caller, which nobody else uses with this lock.
        lock: Entered and left.
        limit: Of a semaphore.
    """
    path = os.environ.get(FILE_VARIABLE)

    def note(kind: str, f: str, value: int | None = None) -> None:
        if path is None:
            return
        at_ns = int(monotonic() * 1e9)
        line = {"process": process, "type": kind, "f": f, "value": value, "time": at_ns, "lock": lock.name}
        fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o666)
        try:
            os.write(fd, encode(line if limit is None else {**line, "limit": limit}, path).encode())
        finally:
            os.close(fd)

    note("invoke", "acquire")
    async with lock as lease:
        note("ok", "acquire", lease.token)
        try:
            yield lease
        finally:
            note("invoke", "release")
    note("ok", "release")
