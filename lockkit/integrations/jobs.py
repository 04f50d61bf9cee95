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
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, get_args

from lockkit import validation
from lockkit.configuration.name_template import NameTemplate
from lockkit.configuration.registry import warn_if_narrow
from lockkit.errors import ConfigurationError, LockTimeout
from lockkit.lease import as_current
from lockkit.sync.client import Client, connect
from lockkit.sync.lease import Lease, current_lease
from lockkit.units import Seconds

__all__ = ["JobOptions", "current_lease"]

OnBusy = Literal["retry", "skip", "wait"]
"""What happens to a job whose lock is busy: it is queued again, dropped, or waits in its worker."""

KEEP_SECONDS: Seconds = 24 * 3600.0
"""Default time for which ``once`` keeps results, seconds: longer than the time in which queues redeliver a job."""

RETRY_SECONDS: Seconds = 5.0
"""How long a job waits in its queue after it found its lock busy, seconds. Longer leaves a free lock unused; shorter
costs messages."""

P = ParamSpec("P")
R = TypeVar("R")


class JobOptions(TypedDict, total=False):
    """The options of `lockkit.integrations.dramatiq.locked_actor` and `lockkit.integrations.rq.locked_job`."""

    on_busy: OnBusy
    """
    What happens to a job whose lock is busy: ``"retry"`` queues it again (the default), ``"skip"`` drops it,
    ``"wait"`` waits in the worker.
    """

    busy_countdown: Seconds | timedelta
    """After how many seconds a ``"retry"`` is to run; 5 by default."""

    ttl: Seconds | timedelta | None
    """Seconds until others get the lock of a worker that was killed. None: the client's default."""

    timeout: Seconds | timedelta | None
    """
    How many seconds ``"wait"`` waits for the lock, and before that for a run of the same ``once``, before it raises
    `lockkit.LockTimeout`; None without limit.
    """

    once: str | None
    """
    Key such as ``charge:{order_id}``: a job with it runs until it has succeeded once, and repeats return the stored
    result, which must be JSON.
    """

    keep: float | timedelta
    """How many seconds that result is kept; a day by default."""

    url: str | None
    """Lock server, as for `lockkit.connect`. Each process makes its own client."""


_clients: dict[tuple[int, str | None], Client] = {}

inside: ContextVar[bool] = ContextVar("lockkit_job_inside", default=False)
"""Whether the function of a job runs here, so that a call is not the worker's."""


def client_of_process(url: str | None = None) -> Client:
    """Return the client of this process, created at its first use, so that a forked worker never uses its parent's."""
    key = (os.getpid(), url)
    client = _clients.get(key)
    if client is None:
        made = connect(url)
        # Two threads may create one each. The second then uses the first's; neither has connected yet.
        client = _clients.setdefault(key, made)
        # A worker of RQ, Dramatiq or Celery usually is one of several processes, so memory:// excludes nobody.
        if client is made and (url is None or client.capabilities.scope == "process"):
            warn_if_narrow(client, "jobs are locked")
    return client


class JobBusy(Exception):
    """A job did not run, because its lock or its key was busy."""

    def __init__(self, timeout: LockTimeout) -> None:
        super().__init__(str(timeout))
        self.timeout = timeout


class JobLock:
    """The lock of one kind of job, and the key by which it runs once."""

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
        again: type | tuple[()] = (),
    ) -> None:
        """
        Check what can be checked without a client.

        Of a result of the class `again`, the library runs the job again: ``once`` does not count it as done.
        """
        name = once if lock is None else lock
        if name is None:
            raise ConfigurationError(
                "give the job a lock, such as lock='acct:{n}', or a key, such as once='charge:{order_id}'"
            )
        if on_busy not in get_args(OnBusy):
            raise ConfigurationError(f"on_busy must be 'retry', 'skip' or 'wait', not {on_busy!r}", name=lock)
        self.on_busy = on_busy
        # Checked here although not every job uses it: otherwise a wrong value shows when the first lock is busy, and
        # Celery drops a message that it cannot send again.
        self.busy_countdown = validation.seconds(busy_countdown, "busy_countdown")
        self._lock, self._once = _template("lock", lock, function), _template("once", once, function)
        template = self._lock or self._once
        if template is not None and template.is_coroutine:
            raise ConfigurationError(
                f"{template.label!r} is a coroutine function: use `async with client.lock(...)` in it instead",
                name=name,
            )
        self._lock_label, self._once_label = lock, once
        self._ttl = None if ttl is None else validation.ttl(ttl, 0.0, name=name)
        waits = validation.timeout(timeout, name=name)
        if waits and on_busy != "wait":
            message = f"timeout has no effect with on_busy={on_busy!r}: leave it out, or wait with on_busy='wait'"
            raise ConfigurationError(message, name=name)
        self._timeout = waits if on_busy == "wait" else 0
        self._keep = validation.seconds(keep, "keep", exclusive=True)
        self._again = again

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
            result: R = self._run_locked(client, work, arguments, keywords) if attempt.first else attempt.result
            if attempt.first and not isinstance(self._once.finished(result), self._again):
                attempt.done(result)
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
            with as_current(lease):
                return self._lock.finished(work(lease))


def _template(option: str, text: object, function: Callable[..., Any]) -> NameTemplate | None:
    if text is None:
        return None
    if not isinstance(text, str) or not 0 < len(text) <= validation.NAME_BYTES_MAX:
        longest = validation.NAME_BYTES_MAX
        raise ConfigurationError(f"{option} must be a str of 1 to {longest} characters, not {validation.shown(text)}")
    return NameTemplate(text, function)


def _entered(stack: ExitStack, block: AbstractContextManager[R]) -> R:
    """Enter a block. A `LockTimeout` of entering means busy; one that the job itself raises does not."""
    try:
        return stack.enter_context(block)
    except LockTimeout as error:
        raise JobBusy(error) from error


def check_options(decorator: str, lock: object, options: Mapping[str, object]) -> None:
    """Refuse a decorator without its brackets: the function would be lost, and the first job would fail."""
    if callable(lock):
        raise ConfigurationError(f"write @{decorator}('acct:{{n}}'), with the name of the lock, not @{decorator} alone")
    for name in options.keys() - JobOptions.__annotations__.keys():
        meant = validation.nearest(name, ["lock", *JobOptions.__annotations__])
        raise TypeError(f"{decorator}() got an unexpected keyword argument {name!r}{meant}")


def locked_function(
    function: Callable[P, R],
    lock: str | None,
    options: JobOptions,
    busy: Callable[[JobLock, LockTimeout], R | None],
    again: type | tuple[()] = (),
) -> Callable[P, R | None]:
    """Return a function that runs under the lock of its job, with the client of the calling process."""
    url = options.get("url")
    others: dict[str, Any] = {name: value for name, value in options.items() if name != "url"}
    job = JobLock(function, lock, again=again, **others)

    @functools.wraps(function)
    def locked(*arguments: P.args, **keywords: P.kwargs) -> R | None:
        def work(_: Lease | None) -> R:
            before = inside.set(True)
            try:
                return function(*arguments, **keywords)
            finally:
                inside.reset(before)

        try:
            return job.run(client_of_process(url), work, arguments, keywords)
        except JobBusy as error:
            if job.on_busy == "wait":
                raise error.timeout from None
            return busy(job, error.timeout)

    return locked
