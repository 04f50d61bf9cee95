"""
Jobs that run under a lock: what the integrations of Celery, Dramatiq and RQ share.

The worker acquires a job's lock when it runs the job, not the sender when it sends it: the sender's lock would have to
outlast the queue, and would belong to a process that does not do the work.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from lockkit import validation
from lockkit.configuration.name_template import NameTemplate
from lockkit.errors import ConfigurationError, LockError, LockTimeout
from lockkit.integrations.scopes import warn_if_narrow
from lockkit.sync.client import Client, connect
from lockkit.sync.lease import Lease
from lockkit.units import Seconds

__all__ = [
    "KEEP_SECONDS",
    "RETRY_SECONDS",
    "JobBusy",
    "JobLock",
    "OnBusy",
    "check_called",
    "client_of_process",
    "current_lease",
    "locked_function",
]

OnBusy = Literal["retry", "skip", "wait"]
"""What happens to a job whose lock is busy: it is queued again, dropped, or waits in its worker."""

KEEP_SECONDS: Seconds = 24 * 3600.0
"""Default time for which ``once`` keeps results, seconds: longer than the time in which queues redeliver a job."""

RETRY_SECONDS: Seconds = 5.0
"""How long a job waits in its queue after it found its lock busy, seconds. Longer leaves a free lock unused; shorter
costs messages."""

P = ParamSpec("P")
R = TypeVar("R")

_clients: dict[tuple[int, str | None], Client] = {}
_lease: ContextVar[Lease] = ContextVar("lockkit_job_lease")


def client_of_process(url: str | None = None) -> Client:
    """Return the client of this process, created at its first use, so that a forked worker never uses its parent's."""
    key = (os.getpid(), url)
    client = _clients.get(key)
    if client is None:
        made = connect(url)
        # Two threads may create one each. The second then uses the first's; neither has connected yet.
        client = _clients.setdefault(key, made)
        if client is made and url is None:
            warn_if_narrow(client, "jobs are locked")
    return client


def current_lease() -> Lease:
    """
    Return the lease of the job that runs in this thread or task, for its `token` and ``check()``.

    Raises:
        LockError: No job with a lock runs here.
    """
    lease = _lease.get(None)
    if lease is None:
        message = "current_lease() was called outside a job that has a lock"
        raise LockError(message)
    return lease


class JobBusy(Exception):
    """
    A job did not run, because its lock or its key was busy.

    Attributes:
        timeout: What lockkit raised.
    """

    def __init__(self, timeout: LockTimeout) -> None:
        """Keep it."""
        super().__init__(str(timeout))
        self.timeout = timeout


class JobLock:
    """
    The lock of one kind of job, and the key by which it runs once.

    Attributes:
        on_busy: What happens to a job whose lock is busy.
        busy_countdown: Seconds until a ``"retry"`` runs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        lock: str | None,
        *,
        on_busy: OnBusy = "retry",
        ttl: Seconds | timedelta | None = None,
        timeout: Seconds | timedelta | None = None,
        once: str | None = None,
        keep: float | timedelta = KEEP_SECONDS,
        busy_countdown: Seconds | timedelta = RETRY_SECONDS,
    ) -> None:
        """Check what can be checked without a client. `function` is the job's; its arguments fill the fields."""
        if lock is None and once is None:
            message = "give the job a lock, such as lock='acct:{n}', or a key, such as once='charge:{order_id}'"
            raise ConfigurationError(message)
        if on_busy not in get_args(OnBusy):
            message = f"on_busy must be 'retry', 'skip' or 'wait', not {on_busy!r}"
            raise ConfigurationError(message, name=lock)
        self.on_busy = on_busy
        # Checked here although not every job uses it: otherwise a wrong value shows when the first lock is busy, and
        # Celery drops a message that it cannot send again.
        self.busy_countdown = validation.seconds(busy_countdown, "busy_countdown")
        self._lock, self._once = _template("lock", lock, function), _template("once", once, function)
        template = self._lock or self._once
        if template is not None and template.is_coroutine:
            message = f"{template.label!r} is a coroutine function: use `async with client.lock(...)` in it instead"
            raise ConfigurationError(message, name=lock or once)
        self._lock_label, self._once_label = lock, once
        self._ttl = None if ttl is None else validation.ttl(ttl, 0.0, name=lock or once)
        waits = validation.timeout(timeout, name=lock or once)
        self._timeout = waits if on_busy == "wait" else 0
        self._keep = validation.seconds(keep, "keep", exclusive=True)

    def run(
        self, client: Client, work: Callable[[Lease | None], R], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> R:
        """Run a job under its lock, or return the result of the run that has succeeded; or raise `JobBusy`."""
        with ExitStack() as stack:
            if self._once is None:
                return self._run_locked(client, work, arguments, keywords)
            key = self._once.name(arguments, keywords)
            once = client.once(key, keep=self._keep, ttl=self._ttl, timeout=self._timeout, label=self._once_label)
            attempt = _entered(stack, once)
            if attempt.first:
                attempt.done(self._run_locked(client, work, arguments, keywords))
            result: R = attempt.result
            return result

    def _run_locked(
        self, client: Client, work: Callable[[Lease | None], R], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> R:
        if self._lock is None:
            return work(None)
        name = self._lock.name(arguments, keywords)
        # Reentrant: a job that calls another one directly, as all are called in Celery's eager mode, must not find the
        # lock busy that it holds itself.
        lock = client.lock(name, ttl=self._ttl, timeout=self._timeout, reentrant=True, label=self._lock_label)
        with ExitStack() as stack:
            lease = _entered(stack, lock)
            before = _lease.set(lease)
            try:
                return self._lock.finished(work(lease))
            finally:
                _lease.reset(before)


def _template(option: str, text: object, function: Callable[..., Any]) -> NameTemplate | None:
    if text is None:
        return None
    if not isinstance(text, str) or not 0 < len(text) <= validation.NAME_BYTES_MAX:
        longest = validation.NAME_BYTES_MAX
        message = f"{option} must be a str of 1 to {longest} characters, not {validation.shown(text)}"
        raise ConfigurationError(message)
    return NameTemplate(text, function)


def check_called(lock: object, decorator: str) -> None:
    """Refuse a decorator without its brackets: the function would be lost, and the first job would fail."""
    if callable(lock):
        message = f"write @{decorator}('acct:{{n}}'), with the name of the lock, not @{decorator} alone"
        raise ConfigurationError(message)


def locked_function(
    function: Callable[P, R], job: JobLock, url: str | None, busy: Callable[[JobBusy], R | None]
) -> Callable[P, R | None]:
    """Return a function that runs under the lock of its job, with the client of the calling process."""

    @functools.wraps(function)
    def locked(*arguments: P.args, **keywords: P.kwargs) -> R | None:
        def work(_: Lease | None) -> R:
            return function(*arguments, **keywords)

        try:
            return job.run(client_of_process(url), work, arguments, keywords)
        except JobBusy as error:
            return busy(error)

    return locked


def _entered(stack: ExitStack, block: AbstractContextManager[R]) -> R:
    """Enter a block. A `LockTimeout` of entering means busy; one that the job itself raises does not."""
    try:
        return stack.enter_context(block)
    except LockTimeout as error:
        raise JobBusy(error) from error
