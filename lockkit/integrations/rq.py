"""RQ jobs that run under a lock. Needs ``pip install 'lockkit[rq]'``."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from math import ceil
from typing import ParamSpec, TypeVar, Unpack, cast

from rq import Retry, get_current_job

from lockkit.errors import LockTimeout
from lockkit.integrations.jobs import JobLock, JobOptions, check_options, current_lease, inside, locked_function

__all__ = ["current_lease", "locked_job"]

log = logging.getLogger("lockkit")

AT_ONCE = "sync"
"""Worker in jobs that ``Queue.run_sync`` runs: it takes a `Retry` for the result."""

P = ParamSpec("P")
R = TypeVar("R")


def locked_job(
    lock: str | None = None, **options: Unpack[JobOptions]
) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """
    Decorate the function of jobs: each runs under a lock.

    `current_lease` gives the function its lease, and so the fencing token. If the lease is lost, the job fails with
    `lockkit.LockLost`, even if its function returns normally.

    A job whose lock is busy is scheduled again, which needs a worker with ``--with-scheduler``, counts whole seconds,
    and does not count for the job's own retries; or it ends with None (``"skip"``). If you call the function outside a
    job, or from a job's function, or in a queue with ``is_async=False``, it raises `lockkit.LockTimeout` instead.

    Args:
        lock: Name of the lock, such as ``acct:{n}``, with fields that the arguments fill.
        **options: See `lockkit.integrations.jobs.JobOptions`.

    Raises:
        ConfigurationError: An option is wrong, or a field is no parameter of the function.
    """
    check_options("locked_job", lock, options)

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        def busy(job: JobLock, error: LockTimeout) -> R | None:
            if job.on_busy == "skip":
                log.info("job of %s skipped: %s", function.__qualname__, error)
                return None
            if not _is_called_by_rq(function):
                raise error from None
            # RQ takes it for no result, and counts these apart from the retries of failures.
            return cast("R", Retry(max=sys.maxsize, interval=max(1, ceil(job.busy_countdown))))

        return locked_function(function, lock, options, busy, again=Retry)

    return decorate


def _is_called_by_rq(function: Callable[..., object]) -> bool:
    """Tell whether a worker calls this function as its job: elsewhere, a `Retry` would be the function's result."""
    job = None if inside.get() else get_current_job()
    if job is None or job.worker_name == AT_ONCE:
        return False
    return inspect.unwrap(cast("Callable[..., object]", job.func)) is inspect.unwrap(function)
