"""RQ jobs that run under a lock. Needs ``pip install 'lockkit[rq]'``."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from math import ceil
from typing import ParamSpec, TypeVar, cast

from rq import Retry, get_current_job

from lockkit.integrations.jobs import (
    KEEP_SECONDS,
    RETRY_SECONDS,
    JobBusy,
    JobLock,
    OnBusy,
    check_called,
    current_lease,
    locked_function,
)
from lockkit.units import Seconds

__all__ = ["current_lease", "locked_job"]

log = logging.getLogger("lockkit")

P = ParamSpec("P")
R = TypeVar("R")

_inside: ContextVar[bool] = ContextVar("lockkit_rq_inside", default=False)
"""Whether the function of a job runs here, so that a call is not RQ's."""


def locked_job(
    lock: str | None = None,
    *,
    on_busy: OnBusy = "retry",
    busy_countdown: Seconds | timedelta = RETRY_SECONDS,
    ttl: Seconds | timedelta | None = None,
    timeout: Seconds | timedelta | None = None,
    once: str | None = None,
    keep: float | timedelta = KEEP_SECONDS,
    url: str | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """
    Decorate the function of jobs: each runs under a lock.

    `current_lease` gives the function its lease, and so the fencing token. If the lease is lost, the job fails with
    `lockkit.LockLost`, even if its function returns normally.

    Args:
        lock: Name of the lock, such as ``acct:{n}``, with fields that the arguments fill.
        on_busy: What happens to a job whose lock is busy: ``"retry"`` schedules it again, which needs a worker with
            ``--with-scheduler`` and does not count for the job's own retries; ``"skip"`` ends it with None, ``"wait"``
            waits in the worker. If you call the function outside a job, or from a job's function, it raises
            `lockkit.LockTimeout` instead.
        busy_countdown: After how many seconds a ``"retry"`` is to run; RQ counts whole seconds.
        ttl: Seconds until others get the lock of a worker that was killed. None: the client's default.
        timeout: How many seconds ``"wait"`` waits before it raises `lockkit.LockTimeout`; None without limit.
        once: Key such as ``charge:{order_id}``: a job with it runs until it has succeeded once, and repeats return the
            stored result, which must be JSON.
        keep: How many seconds that result is kept.
        url: Lock server, as for `lockkit.connect`. Each process makes its own client.

    Raises:
        ConfigurationError: An option is wrong, or a field is no parameter of the function.
    """
    check_called(lock, "locked_job")

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        job = JobLock(
            function,
            lock,
            on_busy=on_busy,
            ttl=ttl,
            timeout=timeout,
            once=once,
            keep=keep,
            busy_countdown=busy_countdown,
        )

        @functools.wraps(function)
        def work(*arguments: P.args, **keywords: P.kwargs) -> R:
            before = _inside.set(True)
            try:
                return function(*arguments, **keywords)
            finally:
                _inside.reset(before)

        def busy(error: JobBusy) -> R | None:
            if on_busy == "wait" or (on_busy == "retry" and not _is_called_by_rq(function)):
                raise error.timeout from None
            if on_busy == "retry":
                # RQ takes it for no result, and counts these apart from the retries of failures.
                return cast("R", Retry(max=sys.maxsize, interval=max(1, ceil(job.busy_countdown))))
            log.info("job of %s skipped: %s", function.__qualname__, error)
            return None

        return locked_function(work, job, url, busy)

    return decorate


def _is_called_by_rq(function: Callable[..., object]) -> bool:
    """Tell whether RQ calls this function as its job: for another caller, a `Retry` would be the function's result."""
    job = None if _inside.get() else get_current_job()
    return job is not None and inspect.unwrap(cast("Callable[..., object]", job.func)) is inspect.unwrap(function)
