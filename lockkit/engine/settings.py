"""What a lock is asked for, its defaults, and the margin kept for clocks that run at different rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final, TypedDict

from lockkit.backend import Mode
from lockkit.errors import ConfigurationError
from lockkit.units import Seconds
from lockkit.validation import nearest, shown

DEFAULT_TTL = 30.0
"""Seconds. Longer keeps a crashed holder's lock longer; shorter loses leases to shorter pauses and outages."""

DEFAULT_UNAVAILABLE_AFTER = 30.0
"""Seconds without one answer after which a wait without timeout gives up."""


LIMIT_MAX = 1000
"""Largest limit of a semaphore. With a larger one, a look at all holders takes too long."""


class Inherit:
    """Marks "not given" in signatures where None has a meaning: the lock's timeout, or for a lock the client's."""

    def __repr__(self) -> str:
        """Show what it stands for."""
        return "<inherited>"


INHERIT: Final = Inherit()

LostCallback = Callable[[Any, str], object]
"""Called as ``callback(lease, reason)``."""


class LockOptions(TypedDict, total=False):
    """
    The options of locks: of `Client.lock`, `Client.rwlock`, `Client.semaphore` and `Client.locks` in both APIs.

    For the signature of a function that passes them on: ``**options: Unpack[LockOptions]``.
    """

    ttl: Seconds | timedelta | None
    """
    Seconds after which the backend frees the lock unless it is renewed: how long others wait for a crashed holder.
    None: the client's default (30 s unless configured).
    """

    timeout: Seconds | timedelta | Inherit | None
    """
    Seconds that the caller waits; None without limit, 0 tries once. By default the client's (without limit unless
    configured).
    """

    renew: bool
    """Extend the ttl in the background while held (the default). With False the lease ends at its ttl."""

    reentrant: bool
    """
    The thread that holds the lock through this client gets the same lease again, counted. In the async API, and in a
    thread that runs an event loop: the task that holds it. On Python 3.11 ``asyncio.wait_for`` runs what it is given in
    another task, which waits for this one: use ``asyncio.timeout``. The lease keeps the options that it was acquired
    with: those of a call that enters it again (``ttl``, ``on_lost``, …) have no effect.
    """

    max_hold: Seconds | timedelta | None
    """Seconds after which renewal ends, so that a stuck holder loses the lock. By default never."""

    stall: Seconds | timedelta | None
    """
    Seconds without ``lease.beat()`` after which renewal ends until the next beat, so that a holder that makes no
    progress loses the lock. By default never.
    """

    min_hold: Seconds | timedelta | None
    """
    Seconds from the grant on for which the backend keeps the lock, also if it is released before: so that a job of
    milliseconds does not run again on a host whose clock is late. By default not beyond its release. A client that is
    closed frees the lock, as does one whose program ends.
    """

    metadata: str | Mapping[str, object] | None
    """Text or a mapping of JSON values, shown by ``holders``. Never a secret."""

    on_lost: LostCallback | None
    """
    Called once with ``(lease, reason)`` if the lease is lost: from a thread of its own, or in a task under asyncio,
    where it may be a coroutine function.
    """

    raise_on_lost: bool
    """Leaving ``with`` after a loss raises `LockLost` (the default); False only logs it."""

    label: str | None
    """
    The label under which metrics count the lock, such as ``seat:{seat}``; see `lockkit.add_observer`. By default the
    decorator's name with its fields; without a decorator, none.
    """


@dataclass(slots=True)
class LockSettings:
    """
    The validated arguments of `Client.lock`. Not changed afterwards (``frozen`` would cost a µs per lock).

    Except for `metadata` and `about` after a fork: the process is another one.
    Of a read/write lock (`nests`) the thread or task that holds it gets its lease again for reading.
    """

    name: str
    ttl: float
    timeout: float | None
    renew: bool
    reentrant: bool
    max_hold: float | None
    metadata: str
    on_lost: LostCallback | None
    raise_on_lost: bool
    about: Mapping[str, object]
    """What `metadata` says of this process."""
    mode: Mode = "exclusive"
    nests: bool = False
    limit: int = 1
    """Of a permit: how many may be held at the same time."""
    grace: Seconds = 0.0
    """How long before the deadline the holder stops, seconds: renewals are retried so that some come before that."""
    given_up: Callable[[], bool] | None = None
    """Asked while the acquisition waits; True ends it with a `LockError`."""
    make_lease: Callable[[Any, Any], Any] | None = None
    """Makes the lease from the engine and the record, in place of the client's lease class."""
    label: str | None = None
    """Template of the name, for observers."""
    skips: bool = False
    """A decorated call whose lock stays busy returns None: ``on_busy="skip"``."""
    cancel_on_lost: bool = False
    """``async with`` cancels its body when the lease is lost."""
    min_hold: Seconds = 0.0
    """How long the backend keeps the lock at least, seconds."""
    stall: Seconds | None = None
    """How long the holder may go without a beat, seconds."""
    on_wait: Callable[[], None] | None = None
    """Called when the acquisition begins to wait, perhaps several times. Set if observers are told how it ends."""


def drift_margin(ttl: Seconds) -> float:
    """
    Time by which a deadline is set earlier, since client and server clocks may differ in rate.

    ``ttl * 0.01 + 0.002``, from the Redlock description: 1 % of the ttl, and 2 ms for the granularity of the server's
    expiry. Larger gives up leases earlier than needed; smaller trusts the two clocks more than Redlock does.
    """
    return ttl * 0.01 + 0.002


def skipping_timeout(
    on_busy: object, timeout: Seconds | timedelta | Inherit | None, name: object, backend: str
) -> Seconds | timedelta:
    """Check ``on_busy`` where it is not "raise", and decide how long a call waits before it is skipped."""
    name = name if isinstance(name, str) else None
    if on_busy != "skip":
        words = ["raise", "skip"]
        message = f"on_busy must be 'raise' or 'skip', not {shown(on_busy)}{nearest(on_busy, words)}"
        raise ConfigurationError(message, name=name, backend=backend)
    if timeout is None:
        message = (
            "on_busy='skip' needs a limit: with timeout=None a call waits until the lock is free and is never skipped. "
            "Leave timeout out to try once, or give seconds"
        )
        raise ConfigurationError(message, name=name, backend=backend)
    return 0 if isinstance(timeout, Inherit) else timeout


# -- the parameters of other locking libraries -----------------------------------------------------------------------

_TIMEOUT = "use timeout=, the seconds that the caller waits (0 tries once, None waits without limit)"
_TTL = "use ttl=, the seconds after which the backend frees a lock that is not renewed"
_METADATA = "use metadata= for what holders() shows; lockkit draws the owner id at random for each acquisition"
_RENEWAL = "use renew=; lockkit renews a held lock by default, every third of its ttl"
_POLL = "leave it out: waiters are woken, or poll at intervals that lockkit sets; timeout= limits the wait"

ADVICE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("acquire_timeout", "blocking_timeout", "max_wait", "retry_count", "retry_delay", "retry_times",
             "wait_time", "wait_timeout"),
            _TIMEOUT,
        ),
        **dict.fromkeys(
            ("additional_time", "auto_release_time", "duration", "expire", "expire_in", "expires", "expires_in",
             "lease_time", "lease_timeout", "lifetime", "lock_timeout", "replace_ttl"),
            _TTL,
        ),
        **dict.fromkeys(("id", "identifier", "owner", "token"), _METADATA),
        **dict.fromkeys(("auto_renewal", "auto_renew", "autorenew", "renewal"), _RENEWAL),
        **dict.fromkeys(("check_interval", "interval", "poll_interval", "sleep", "sleep_interval"), _POLL),
        "fail_when_locked": "use timeout=0, which tries once and raises LockTimeout if the lock is busy",
        "thread_local": "leave it out: ownership belongs to the lease, which any thread may release",
    }
)  # fmt: skip
"""Parameter of another library (redis-py, python-redis-lock, pottery, filelock, portalocker, kazoo, etcd3, Redisson and
others) to what to do in lockkit. Only for error messages."""


class NoOthers(TypedDict):
    """
    No keyword at all: the type of ``**unknown`` in a signature whose unknown keywords get an error with advice.

    ``**unknown: Unpack[NoOthers]`` lets type checkers refuse them as well. A wrapper around the method, which catches
    Python's own error, would cost a twentieth of an acquisition.
    """


def unknown_parameter(
    function: Callable[..., object], unknown: Mapping[str, object], options: Iterable[str] = ()
) -> TypeError:
    """Make the error for keywords that a function does not have, as Python words it, with what to do."""
    import inspect  # noqa: PLC0415 - `import lockkit` stays light

    name, value = next(iter(unknown.items()))
    if name in {"blocking", "block", "wait"}:
        advice = "use timeout=0 to try once; by default the call waits"
        if value:
            advice = "leave it out: the call waits unless you use timeout=0"
    else:
        advice = ADVICE.get(name, "")
    message = f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
    known = [*options, *[*inspect.signature(function).parameters][1:-1]]
    return TypeError(f"{message}: {advice}" if advice else f"{message}{nearest(name, known)}")
