"""Tasks that run under a lock."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, Self, TypeVar

from celery import Celery, Task
from celery.exceptions import Reject, Retry

from lockkit import validation
from lockkit.errors import ConfigurationError, LockTimeout
from lockkit.integrations.jobs import KEEP_SECONDS, RETRY_SECONDS, JobBusy, JobLock, OnBusy, client_of_process
from lockkit.sync.lease import Lease
from lockkit.units import Seconds

__all__ = ["LockedTask"]

log = logging.getLogger("lockkit")

R = TypeVar("R")

_MEANT = {"ttl": "lock_ttl", "timeout": "lock_timeout", "keep": "once_keep"}
"""Options as those of Dramatiq and RQ are called, and what they are called here."""

_OPTIONS = ("lock", "lock_ttl", "lock_timeout", "on_busy", "busy_countdown", "once", "once_keep")

_OURS = ("lock", "once", "busy", "on_busy")
"""Beginnings of names that can hardly be meant for anything but this class."""

_SETTINGS = ("lockkit_url", "lockkit_beat_name", "lockkit_beat_ttl")


class LockedTask(Task):  # type: ignore[misc] # celery has no types
    """
    Base of tasks that run under a lock: ``@app.task(base=LockedTask, lock="acct:{n}")``.

    The worker acquires the lock when it runs the task, renews it meanwhile, and releases it after the task. While the
    task runs, ``self.request.lockkit_token`` is the fencing token, and ``self.request.lockkit_lease`` the lease. If the
    lease is lost, even a task that returns normally fails with `lockkit.LockLost`.

    Celery makes attributes of all options of the decorator. So this class refuses one that looks like a misspelt option
    of its own, unless your task class declares it, with an annotation if the class derives from this one.

    Attributes:
        lock: Name of the lock, with fields that the task's arguments fill.
        on_busy: What happens to a task whose lock is busy: ``"retry"`` sends it again, ``"skip"`` ends it with None,
            ``"wait"`` waits in the worker. A task that is called directly, or eagerly, raises `lockkit.LockTimeout`
            instead of being sent again.
        busy_countdown: After how many seconds a ``"retry"`` is to run. It does not count towards ``max_retries``.
        lock_ttl: Seconds until others get the lock of a worker that was killed. None: the client's default.
        lock_timeout: How many seconds ``"wait"`` waits for the lock, and before that for a run of the same ``once``,
            before it fails with `lockkit.LockTimeout`; None without limit.
        once: Key, with fields: a task with this key runs until it has succeeded once; repeats return the stored
            result, which must be JSON.
        once_keep: How many seconds that result is kept.
    """

    abstract = True

    lock: ClassVar[str | None] = None
    on_busy: ClassVar[OnBusy] = "retry"
    busy_countdown: ClassVar[Seconds | timedelta] = RETRY_SECONDS
    lock_ttl: ClassVar[Seconds | timedelta | None] = None
    lock_timeout: ClassVar[Seconds | timedelta | None] = None
    once: ClassVar[str | None] = None
    once_keep: ClassVar[float | timedelta] = KEEP_SECONDS

    _job_lock: ClassVar[JobLock | None] = None

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """
        Check the options when Celery registers the task, not at its first call.

        Raises:
            ConfigurationError: The task has neither ``lock`` nor ``once``, an option is wrong or misspelt, or a field
                is no argument of the task.
        """
        super().on_bound(app)
        cls._job_lock = None
        if inspect.getattr_static(cls, "run") is Task.run or cls.__module__ == "celery.app.builtins":
            return  # a base of tasks, which cannot run, or Celery's own, if this is the base of all tasks of the app
        cls._refuse_other_names()
        refuse_other_settings(app)
        if cls.lock is None and cls.once is None:
            raise ConfigurationError(
                f"task {cls.name!r} is a LockedTask with neither lock= nor once=, and would run without a lock: give "
                "it one, such as lock='acct:{n}', or another base"
            )
        run = inspect.getattr_static(cls, "run").__get__(object(), cls)  # without the `self` of a bound task
        cls._job_lock = JobLock(
            run,
            cls.lock,
            on_busy=cls.on_busy,
            ttl=cls.lock_ttl,
            timeout=cls.lock_timeout,
            once=cls.once,
            keep=cls.once_keep,
            busy_countdown=cls.busy_countdown,
        )

    @classmethod
    def _refuse_other_names(cls) -> None:
        """
        Refuse attributes that are misspelt options: they would have no effect.

        In the decorator also the names that Dramatiq and RQ have for them. What the application declares, by an
        annotation or in a class that does not derive from this one, is its own.
        """
        kinds = [kind for kind in cls.__mro__ if issubclass(kind, LockedTask) and kind is not LockedTask]
        own = {name for kind in cls.__mro__ if kind not in kinds for name in vars(kind)}
        for kind in cls.__mro__:
            if "_decorated" not in vars(kind):  # of a decorated one they are its function's
                with suppress(NameError):  # of a name that only type checkers import, from Python 3.14 on
                    own.update(inspect.get_annotations(kind))
        for kind in kinds:
            decorated = "_decorated" in vars(kind)
            for name, value in vars(kind).items():
                if name in own or name.startswith("_") or (hasattr(value, "__get__") and not decorated):
                    continue
                # A class of the application's own may have a timeout=, and its tasks other values for it.
                meant = _meant(name, others=decorated and not any(name in vars(base) for base in kinds[1:]))
                if meant is not None:
                    message = (
                        f"task {cls.name!r} was given {name}=, which has no effect: use {meant}=. If it is an "
                        f"attribute of your own, declare it in a class of your tasks, as in `{name}: str`"
                    )
                    raise ConfigurationError(message, name=cls.lock or cls.once)

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """
        Make the task, with the lock around its `run`.

        Around that and not around `__call__`, so Celery itself makes the request of a direct call, also of one within
        the task, and its ``autoretry_for`` counts lockkit's errors too. In the instance, so that ``super().run()`` is
        the plain one; and here because classes of tasks often do not call the `__init__` of their base.
        """
        task: Self = super().__new__(cls)
        run = task.run

        @functools.wraps(run)
        def run_locked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - what the task returns
            return task._run_locked(run, args, kwargs)

        task.run = run_locked
        return task

    def _run_locked(self, run: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R | None:
        job = self._job_lock
        if job is None:
            return run(*args, **kwargs)
        request = self.request

        def work(lease: Lease | None) -> R:
            outer: Lease | None = request.get("lockkit_lease")
            request.lockkit_lease, request.lockkit_token = lease, lease and lease.token
            try:
                return run(*args, **kwargs)
            finally:
                request.lockkit_lease = outer
                if outer is not None:  # the task called its own run(), and both have one request
                    request.lockkit_token = outer.token

        try:
            return job.run(client_of_process(self.app.conf.get("lockkit_url")), work, args, kwargs)
        except JobBusy as busy:
            self._busy(job, busy.timeout)
            return None

    def _busy(self, job: JobLock, error: LockTimeout) -> None:
        request = self.request
        if job.on_busy == "skip":
            log.info("task %s[%s] skipped: %s", self.name, request.id, error)
            return
        if job.on_busy == "wait" or request.called_directly or request.is_eager:
            raise error
        # Not Task.retry(): it counts for max_retries, and a busy lock is no failure of the task.
        signature = self.signature_from_request(request, countdown=job.busy_countdown, retries=request.retries)
        try:
            signature.apply_async()
        except Exception as failed:  # as Task.retry() does: the broker keeps the message, or drops it by its own rules
            raise Reject(failed, requeue=False) from failed
        raise Retry(exc=error, when=job.busy_countdown, sig=signature) from error


def _meant(name: str, *, others: bool) -> str | None:
    """Return the option that a name is likely to stand for; with others, also if it is like one of other decorators."""
    name = name.lower()
    cutoff = 0.3 if name.startswith(_OURS) else 0.75
    if found := difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=cutoff):
        return found[0]
    found = difflib.get_close_matches(name, _MEANT, n=1, cutoff=0.8) if others else []
    return _MEANT[found[0]] if found else None


def refuse_other_settings(app: Celery) -> None:
    """
    Refuse settings of the app that are lockkit's by their name, but have no effect.

    Raises:
        ConfigurationError: There is one.
    """
    for setting, value in app.conf.items():
        _, found, rest = str(setting).lower().rpartition("lockkit_")
        # In upper case without a namespace, or without its prefix, Celery does not find it.
        ignored = value is not None and app.conf.get(found + rest) is None
        if found and (found + rest not in _SETTINGS or ignored):
            known = ", ".join(_SETTINGS)
            meant = validation.nearest(found + rest, _SETTINGS)
            message = (
                f"Celery's setting {setting!r} has no effect{meant}: lockkit's settings are {known}, or "
                "CELERY_LOCKKIT_URL and so on if the namespace is CELERY"
            )
            raise ConfigurationError(message)
