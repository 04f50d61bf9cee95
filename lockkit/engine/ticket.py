"""
Tickets: a lease that one client ends without releasing it, and that another takes.

The giver has the backend keep the lock for the ticket's time, and renews it no more. The taker has the backend replace
the ticket's owner by its own in one atomic step, with a larger token. So of two takers (a message that was delivered
twice) one gets the lock, and what the giver still sends to guarded storage is refused.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from lockkit import validation
from lockkit.backend import CALL_SECONDS, LockBackend
from lockkit.engine.acquisition import Acquisition, AcquisitionContext
from lockkit.engine.client_state import ClientState
from lockkit.engine.settings import LockSettings
from lockkit.errors import BackendUnavailable, ConfigurationError, LockLost, Unsupported
from lockkit.runtime import wall_clock
from lockkit.units import Instant

L = TypeVar("L")

_PREFIX = "lk1-"
_HEAD = struct.Struct(">16sQd")
"""Owner, token, and until when the ticket is good, Unix time by the giver's clock; the name follows."""

_TEXT = re.compile(r"lk1-[A-Za-z0-9_-]{43,400}\Z")


@dataclass(frozen=True, slots=True)
class Handed:
    """What a ticket says."""

    name: str
    owner: str
    token: int
    until: float

    def __str__(self) -> str:
        """Write the ticket."""
        packed = _HEAD.pack(bytes.fromhex(self.owner), self.token, self.until) + self.name.encode()
        return _PREFIX + base64.urlsafe_b64encode(packed).rstrip(b"=").decode()


def read(ticket: object, url: str) -> Handed:
    """Read a ticket, which may be any text."""
    if isinstance(ticket, str) and _TEXT.match(ticket):
        text = ticket[len(_PREFIX) :]
        try:
            packed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            owner, token, until = _HEAD.unpack_from(packed)
            name = validation.lock_name(packed[_HEAD.size :].decode())
        except (binascii.Error, struct.error, UnicodeDecodeError, ConfigurationError):
            pass  # as other text that is no ticket
        else:
            return Handed(name, owner.hex(), token, until)
    given = (
        "a text" if isinstance(ticket, str) else type(ticket).__name__
    )  # never shown: it may be a good one, mistyped
    message = f"take() takes the text that lease.ticket() returned, not {given} that is none"
    raise ConfigurationError(message, backend=url)


def require(client: ClientState, what: str) -> None:
    """Check that the backend can give a lock to another owner."""
    if not client.capabilities.transfer:
        message = (
            f"{what} needs a backend that can give a held lock to another owner (capabilities.transfer), which "
            f"{client.url} is not. Acquire the lock where the work is done, or use redis://, file: or the lock table "
            "of a database"
        )
        raise Unsupported(message, backend=client.url)


class Taking(Acquisition[L]):
    """One call of ``take``: as an acquisition, but of a lock that the ticket's owner holds."""

    _too_late_error = LockLost  # it waits for nobody, so nothing timed out

    def __init__(
        self, context: AcquisitionContext[L], backend: LockBackend, settings: LockSettings, handed: Handed
    ) -> None:
        """Start the clock."""
        # Longer than the ttl it need not try: a grant whose answer was lost has ended then.
        super().__init__(context, backend, settings, min(settings.ttl, context.unavailable_after))
        self._handed = handed

    async def take(self) -> L:
        """Take the lock. Not in the client's queue, whose head may wait for this very lock."""
        while (lease := await self._ask(self._runtime.now())) is None:
            pass
        return lease

    async def _ask(self, started: Instant) -> L | None:
        """Ask the backend once. None: it did not answer, and is asked again."""
        request = self._request
        request.answer_by = min(started + CALL_SECONDS, self._answer_by)
        self._attempts += 1
        try:
            request.uncertain = True
            grant = await self._backend.take_over(request, self._handed.owner)
            self._context.answered_at = started
            if self._outage is not None or self._context.last_error is not None:
                self._answered()
            if grant is None:
                request.uncertain = False
                self._refuse()
            # The request that was granted may be an earlier one, whose answer was lost: the same owner has sent all.
            lease = self._context.admit(self._settings, grant, self._began)
        except BackendUnavailable as error:
            try:
                await self._back_off(error)
            except BaseException:
                await self._undo()
                raise
        except BaseException:
            await self._undo()
            raise
        else:
            if lease is None:
                await self._undo()
                raise self._too_late()
            return lease
        return None

    def _refuse(self) -> NoReturn:
        handed, url = self._handed, self._client.url
        over = f": its time is over for {wall_clock() - handed.until:.1f} s" if wall_clock() > handed.until else ""
        message = (
            f"the ticket of lock {handed.name!r} (token {handed.token}) finds no lock to take at {url}{over}. It was "
            "taken already, nobody took it in time, the lock was broken, or this is another lock service."
        )
        raise LockLost(message, name=handed.name, backend=url)
