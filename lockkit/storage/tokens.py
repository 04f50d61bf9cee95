"""Fencing tokens as guards take and refuse them: the same for every store. See `lockkit.fencing`."""

from __future__ import annotations

from lockkit.errors import ConfigurationError, StaleToken
from lockkit.validation import shown

TOKEN_MAX = 2**63 - 1
"""Largest token: stores keep it as a signed 64-bit number."""


def check_token(token: object, *, name: str | None = None) -> int:
    """
    Check that a value is a fencing token. For guards of further stores.

    Args:
        token: What the caller gave.
        name: What is guarded, for the error.

    Raises:
        ConfigurationError: The value is not a whole number from 1 to `TOKEN_MAX`.
    """
    if isinstance(token, bool) or not isinstance(token, int) or not 1 <= token <= TOKEN_MAX:
        message = f"token must be a fencing token, not {shown(token)}: give the token of your lease, lease.token"
        raise ConfigurationError(message, name=name)
    return token


def stale_token(what: str, token: int, last: int, *, name: str | None = None, backend: str | None = None) -> StaleToken:
    """
    Make the error for a refused write. For guards of further stores.

    Args:
        what: What was tried, as the start of a sentence.
        token: The caller's token.
        last: The newest token that was accepted.
        name: What is guarded.
        backend: Where, without a password.
    """
    place = "".join((f" to {name!r}" if name else "", f" at {backend}" if backend else ""))
    message = (
        f"{what}{place} was refused: token {last} was accepted before, which is newer than yours, {token}. "
        "Another holder has taken over the lock: stop the work, and acquire the lock again before you start over"
    )
    return StaleToken(message, name=name, backend=backend)
