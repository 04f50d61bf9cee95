"""Dramatiq actors that run under a lock. Needs ``pip install 'lockkit[dramatiq]'``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import dramatiq
from dramatiq.errors import Retry

from lockkit import validation
from lockkit.errors import ConfigurationError, LockTimeout
from lockkit.integrations.jobs import JobLock, JobOptions, check_options, current_lease, locked_function

__all__ = ["ActorBusy", "current_lease", "locked_actor"]

log = logging.getLogger("lockkit")

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


def locked_actor(lock: str | None = None, **options: Any) -> Callable[[Callable[P, R]], dramatiq.Actor[P, R | None]]:
    """
    Decorate a function: make it an actor that runs under a lock.

    `current_lease` gives the function its lease, and so the fencing token. If the lease is lost, the message fails with
    `lockkit.LockLost`, even if its function returns normally.

    Args:
        lock: Name of the lock, such as ``acct:{n}``, with fields that the arguments fill.
        **options: Those of `lockkit.integrations.jobs.JobOptions`; all others are for ``dramatiq.actor``. A message
            that is sent again because its lock was busy counts towards ``max_retries``.

    Raises:
        ConfigurationError: An option is wrong, or a field is no parameter of the function.
    """
    own = {name: options.pop(name) for name in JobOptions.__annotations__ if name in options}
    check_options("locked_actor", lock, own)

    def decorate(function: Callable[P, R]) -> dramatiq.Actor[P, R | None]:
        if isinstance(function, dramatiq.Actor):
            message = f"{function.actor_name!r} is an actor already: write @locked_actor in place of @dramatiq.actor"
            raise ConfigurationError(message, name=lock or own.get("once"))

        def busy(job: JobLock, error: LockTimeout) -> None:
            if job.on_busy == "retry":
                details = {"name": error.name, "backend": error.backend, "holder": error.holder}
                raise ActorBusy(str(error), delay=round(job.busy_countdown * 1000), **details) from None
            log.info("message of actor %s skipped: %s", function.__qualname__, error)

        locked = locked_function(function, lock, cast("JobOptions", own), busy)
        try:
            actor: dramatiq.Actor[P, R | None] = dramatiq.actor(locked, **options)
        except ValueError as error:  # an option that no middleware of its broker knows, or a wrong name
            meant = "".join(validation.nearest(name, ["lock", *JobOptions.__annotations__]) for name in options)
            raise ConfigurationError(
                f"actor {function.__qualname__!r}: {error}{meant}", name=lock or own.get("once")
            ) from error
        return actor

    return decorate
