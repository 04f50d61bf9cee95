"""Dramatiq actors that run under a lock. Needs ``pip install 'lockkit[dramatiq]'``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import dramatiq
from dramatiq.errors import Retry

from lockkit import validation
from lockkit.errors import ConfigurationError, LockTimeout
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

__all__ = ["ActorBusy", "current_lease", "locked_actor"]

log = logging.getLogger("lockkit")

_OPTIONS = ("lock", "on_busy", "busy_countdown", "ttl", "timeout", "once", "keep", "url")

P = ParamSpec("P")
R = TypeVar("R")


class ActorBusy(Retry, LockTimeout):
    """
    The lock of an actor is busy. In a worker, Dramatiq sends the message again; elsewhere it is a `LockTimeout`.

    Attributes:
        delay: Milliseconds until Dramatiq delivers the message again.
    """

    def __init__(self, message: str = "", *, delay: int = 0, **details: Any) -> None:
        """As `lockkit.LockTimeout`, with the delay."""
        LockTimeout.__init__(self, message, **details)
        self.message = message  # of Dramatiq's errors, for their text
        self.delay = delay


def locked_actor(
    lock: str | None = None,
    *,
    on_busy: OnBusy = "retry",
    busy_countdown: Seconds | timedelta = RETRY_SECONDS,
    ttl: Seconds | timedelta | None = None,
    timeout: Seconds | timedelta | None = None,
    once: str | None = None,
    keep: float | timedelta = KEEP_SECONDS,
    url: str | None = None,
    **options: Any,
) -> Callable[[Callable[P, R]], dramatiq.Actor[P, R | None]]:
    """
    Decorate a function: make it an actor that runs under a lock.

    `current_lease` gives the function its lease, and so the fencing token. If the lease is lost, the message fails with
    `lockkit.LockLost`, even if its function returns normally.

    Args:
        lock: Name of the lock, such as ``acct:{n}``, with fields that the arguments fill.
        on_busy: What happens to a message whose lock is busy: ``"retry"`` sends it again, which counts towards
            ``max_retries``; ``"skip"`` drops it, ``"wait"`` waits in the worker's thread.
        busy_countdown: After how many seconds a ``"retry"`` is to run.
        ttl: Seconds until others get the lock of a worker that was killed. None: the client's default.
        timeout: How many seconds ``"wait"`` waits before it raises `lockkit.LockTimeout`; None without limit.
        once: Key such as ``charge:{order_id}``: a message with it runs until it has succeeded once, and repeats return
            the stored result, which must be JSON.
        keep: How many seconds that result is kept.
        url: Lock server, as for `lockkit.connect`. Each process makes its own client.
        **options: For ``dramatiq.actor``.

    Raises:
        ConfigurationError: An option is wrong, or a field is no parameter of the function.
    """
    check_called(lock, "locked_actor")

    def decorate(function: Callable[P, R]) -> dramatiq.Actor[P, R | None]:
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

        def busy(error: JobBusy) -> None:
            if on_busy == "wait":
                raise error.timeout from None
            if on_busy == "retry":
                timeout = error.timeout
                details = {"name": timeout.name, "backend": timeout.backend, "holder": timeout.holder}
                raise ActorBusy(str(timeout), delay=round(job.busy_countdown * 1000), **details) from None
            log.info("message of actor %s skipped: %s", function.__qualname__, error)

        try:
            actor: dramatiq.Actor[P, R | None] = dramatiq.actor(locked_function(function, job, url, busy), **options)
        except ValueError as error:  # an option that no middleware of its broker knows, or a wrong name
            meant = "".join(validation.nearest(name, _OPTIONS) for name in options)
            message = f"actor {function.__qualname__!r}: {error}{meant}"
            raise ConfigurationError(message, name=lock or once) from error
        return actor

    return decorate
