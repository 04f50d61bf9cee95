"""
The process in which one subject is measured.

Forked by `lockkit.testing.fork_servers` for `lockkit_tools.bench.worker_pool`. Its standard input is a connection to
that process, on which it gets one job, and answers:

=====================  ====================================================================
from the parent        to the parent
=====================  ====================================================================
the job
..                     ``{"ready": …}`` as often as the workload says, each answered by
``{"go": …}``
..                     at the end ``{"result": …}`` or ``{"error": text}``
=====================  ====================================================================
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from lockkit.runtime import drive
from lockkit_tools.bench.adapters.base import load
from lockkit_tools.bench.parts import ParentPipe
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.workloads import WORKLOADS


def main() -> NoReturn:
    """Do one job and end."""
    parent = ParentPipe(Connection(sys.stdin.fileno()))
    status = 0
    try:
        parent.send({"result": _work(parent.job(), parent)})
    except BaseException as error:  # noqa: BLE001 - the parent reports it, and goes on with the next subject
        traceback.print_exc()
        parent.send({"error": f"{type(error).__name__}: {error}"})
        status = 1
    # No orderly end: threads that still wait for a lock (100 idle waiters of a library) would keep the process.
    sys.stderr.flush()
    os._exit(status)


def _work(job: Mapping[str, Any], parent: ParentPipe) -> dict[str, Any]:
    # The default action ends the process: nothing that a library does can make it outlive the run.
    signal.alarm(int(job["limit"]) + 1)
    subject: Subject = job["subject"]
    adapter = load(subject.target)(subject.url, job["ttl"])
    workload = WORKLOADS[job["workload"]]

    async def work() -> dict[str, Any]:
        await adapter.open()
        result = await workload.work(adapter, job["part"], parent)
        await adapter.close()
        return result

    return asyncio.run(work()) if adapter.face == "asyncio" else drive(work())
