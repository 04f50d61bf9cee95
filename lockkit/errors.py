"""
The exception tree.

::

    LockError
    ├── ConfigurationError   (also ValueError)           the call or the setup is wrong; fix it, do not retry
    ├── BackendUnavailable   (also ConnectionError)      no answer from the backend; retrying may help
    │   └── NoQuorum                                     too few of several nodes answered
    ├── LockTimeout          (also TimeoutError)         another client held the lock for the whole wait
    ├── LockLost                                         the lease ended before the work did; stop the work
    ├── StaleToken                                       the storage has accepted a newer holder's write; stop the work
    ├── KeyReused                                        a known key of `once` was used with a different `match`
    ├── StoredError                                      the work of `once` ended with an error that was stored
    └── Unsupported          (also NotImplementedError)  this backend cannot do it

Each also derives from the built-in class that users already catch, so ``except TimeoutError`` keeps working.
Driver exceptions never reach the caller: they are the ``__cause__``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "BackendUnavailable",
    "ConfigurationError",
    "KeyReused",
    "LockError",
    "LockLost",
    "LockTimeout",
    "NoQuorum",
    "StaleToken",
    "StoredError",
    "Unsupported",
]  # the errors; `LockHolder` is what one of them carries

TEXT_CHARS_MAX = 4096
"""How much of a text goes into a message. More would let another client, or a server, fill the log."""


def plain(value: object, limit: int = TEXT_CHARS_MAX) -> str:
    """
    Return text that a terminal and a log only show: on one line, without control characters, not longer than a limit.

    Other clients write metadata, owners and stored errors, and servers write error texts. An escape sequence in them
    must not reach a terminal, nor a line break begin a line of the log.

    Args:
        value: Shown as by ``str()``.
        limit: Characters of it that are kept.
    """
    text = str(value)
    if len(text) > limit:
        text = f"{text[: limit - 1]}…"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


DOCUMENTATION = "https://lockkit.readthedocs.io/en/stable/"
"""Where the pages of docs/ are published. Nothing is ever fetched from there."""


class LockError(Exception):
    """
    Base class of everything that lockkit raises.

    Raised itself only when a client is misused, for example by a call after ``close()``.

    Attributes:
        name: The lock of the call, or None.
        backend: URL of the backend without its password, or None.
    """

    name: str | None
    backend: str | None

    def __init__(self, message: str = "", *, name: str | None = None, backend: str | None = None) -> None:
        """Keep ``message``, on one line; ``name`` and ``backend`` become attributes (and survive pickling)."""
        super().__init__(plain(message))
        # What lives apart from the locks (`lockkit.backend.apart`) goes by the name that the user gave it.
        given = getattr(name, "given", name)
        self.name = given.rpartition("\0")[2] if given is not None and given.startswith("\0") else given
        self.backend = backend

    def __str__(self) -> str:
        """Return the message alone (``OSError`` bases would format an errno)."""
        return str(self.args[0]) if self.args else ""

    @property
    def help_url(self) -> str:
        """The page that explains the causes of this error, and what to do. Messages leave it out: they go into logs."""
        kind = next(
            cls for cls in type(self).__mro__ if cls.__module__ == __name__
        )  # of a subclass elsewhere: its base
        return f"{DOCUMENTATION}reference/errors/#{kind.__name__.lower()}"


class ConfigurationError(LockError, ValueError):
    """
    A name, number, option, URL, profile or credential is wrong. No lock was requested.

    There are two other cases: a decorated function returned an awaitable or a generator (the lock was released again),
    and the result of ``once`` cannot be stored (the work is done).
    """


class BackendUnavailable(LockError, ConnectionError):
    """
    The backend gave no usable answer: it is down, unreachable, refusing, full or misbehaving.

    It may be unknown whether the operation happened; lockkit has undone it as far as it could, by owner.

    Attributes:
        sent: False if the request certainly never left this machine, as when the server refuses connections: then there
            is nothing to undo. A backend sets it.
    """

    sent: bool = True


class NoQuorum(BackendUnavailable):
    """Fewer than a majority of several nodes answered."""


_SHOWN_CHARS_MAX = 64
"""How much of each fact about a holder goes into a message: room for a host name."""

_SHOWN_OWNER_CHARS_MAX = 12
"""How much of an owner that is no client of lockkit: its value may be a secret of an application, as with ``prefix=``.
More shows more of it; less does not tell holders apart."""


@dataclass(frozen=True, slots=True)
class LockHolder:
    """
    Who holds a lock, as `LockTimeout` shows it.

    Attributes:
        owner: Owner id of the lease (for a foreign client: what it has stored).
        host: Name of its host; None for a foreign client.
        pid: Process id there; None for a foreign client.
        text: The text that the application gave as ``metadata``, if any.
        metadata: All of the holder's metadata.
    """

    owner: str
    host: str | None = None
    pid: int | None = None
    text: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        """Return a few words for a message."""
        known = {"host": self.host, "pid": self.pid, "text": self.text and repr(self.text[:_SHOWN_CHARS_MAX])}
        shown = ", ".join(f"{key} {plain(value, _SHOWN_CHARS_MAX)}" for key, value in known.items() if value)
        return shown or f"owner {plain(self.owner, _SHOWN_OWNER_CHARS_MAX)}"


class LockTimeout(LockError, TimeoutError):
    """
    The lock stayed busy until the caller's ``timeout``. The backend did answer: another client holds the lock.

    Attributes:
        holder: Who held the lock at the end of the wait; None if lockkit does not know. After a call with ``timeout=0``
            lockkit knows it only where the refusal says so (memory, file, a lease of the same client): it does not ask
            again for that.
    """

    holder: LockHolder | None

    def __init__(
        self,
        message: str = "",
        *,
        name: str | None = None,
        backend: str | None = None,
        holder: LockHolder | None = None,
    ) -> None:
        """As `LockError`, with the holder."""
        super().__init__(message, name=name, backend=backend)
        self.holder = holder


class LockLost(LockError):
    """
    The lease ended early: its deadline passed, or the backend gave the lock to another client.

    Work done after the loss was not protected. Stop, and let storage check the fencing token.
    """


class StaleToken(LockError):
    """The guarded storage has already accepted a higher fencing token: another holder has taken over."""


class KeyReused(LockError):
    """A key of ``once`` is done, and was used again with a different ``match``: it stands for two different things."""


class StoredError(LockError):
    """
    The work of a key of ``once`` ended with an error that ``store_errors`` lists; lockkit did not run it again.

    Attributes:
        type_name: Name of that error's class.
        text: What ``str()`` gave of it.
    """

    type_name: str = ""
    text: str = ""


class Unsupported(LockError, NotImplementedError):
    """The backend, or the rights it was given, do not allow this. The message names what is missing."""
