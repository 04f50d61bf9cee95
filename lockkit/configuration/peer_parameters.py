"""Names the parameter of lockkit when a call uses that of another locking library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypedDict

from lockkit.validation import nearest

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


def unknown_parameter(function: Callable[..., object], unknown: Mapping[str, object]) -> TypeError:
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
    known = [*inspect.signature(function).parameters][1:-1]
    return TypeError(f"{message}: {advice}" if advice else f"{message}{nearest(name, known)}")
