"""The events that observers are called with, made from what the engine knows. See `lockkit.observers`."""

from __future__ import annotations

from lockkit import observers
from lockkit.backend import Mode, split_space
from lockkit.engine.client_state import ClientState
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.settings import LockSettings
from lockkit.errors import BackendUnavailable, LockTimeout
from lockkit.observers import Call, LockEvent
from lockkit.runtime import wall_clock
from lockkit.units import Seconds


class ObservedCall:
    """A call that acquires while there are observers."""

    __slots__ = ("_began", "_client", "_settings", "_waits")

    def __init__(self, client: ClientState, settings: LockSettings) -> None:
        """Start the clock."""
        self._client = client
        self._settings = settings
        self._began = client.runtime.now()
        self._waits = False

    def waits(self) -> None:
        """Tell the observers, once, that the call waits."""
        if not self._waits:
            self._waits = True
            observers.post("waiting", self._event())

    async def granted(self, record: LeaseRecord) -> None:
        """Tell the observers that the call has the lock."""
        grant = record.grant
        await observers.tell(self._client.runtime, "granted", self._event(grant.token, grant.owner))

    async def refused(self, error: BaseException) -> None:
        """Tell the observers why the call does not get the lock."""
        if isinstance(error, LockTimeout):
            reason = "busy"
        elif isinstance(error, BackendUnavailable):
            reason = "unavailable"
        else:
            reason = "error" if isinstance(error, Exception) else "cancelled"
        event = self._event(reason=reason)
        if reason == "cancelled":
            observers.post("refused", event)
        else:
            await observers.tell(self._client.runtime, "refused", event)

    def _event(self, token: int | None = None, owner: str | None = None, reason: str | None = None) -> LockEvent:
        client, settings = self._client, self._settings
        waited = client.runtime.now() - self._began
        name = split_space(settings.name)[1]
        return LockEvent(
            name, settings.label, client.url, settings.mode, token, owner, waited, None, reason, wall_clock(),
            self._waits,
        )  # fmt: skip


def of_lease(record: LeaseRecord, reason: str | None = None, late: Seconds | None = None) -> LockEvent:
    """Make the event of a lease."""
    grant, client = record.grant, record.client
    name, mode = public(client, grant.name, record.mode)
    held = client.runtime.now() - record.since
    assert held >= 0.0, "counted from before the request"
    return LockEvent(
        name, record.settings.label, client.url, mode, grant.token, grant.owner, None, held, reason, wall_clock(),
        late=late,
    )  # fmt: skip


def post(call: Call, record: LeaseRecord, reason: str | None = None, late: Seconds | None = None) -> None:
    """Hand an event of a lease to the observers without waiting for them. Never under the mutex."""
    if observers.active is not None:
        observers.post(call, of_lease(record, reason, late))


def undone(client: ClientState, settings: LockSettings, owner: str) -> None:
    """Tell the observers that a request has been withdrawn."""
    if observers.active is not None:
        name, mode = public(client, settings.name, settings.mode)
        event = LockEvent(name, settings.label, client.url, mode, None, owner, None, None, None, wall_clock())
        observers.post("undone", event)


def public(client: ClientState, name: str, mode: Mode) -> tuple[str, Mode]:
    """Return name and mode as the application knows them: where each slot is a lock, those of the semaphore."""
    space, plain = split_space(name)
    if space == "sem" and client.capabilities.permits == "slots":
        assert "#" in plain, "each slot is a lock of its own, named by `slot_name`"
        return plain.rpartition("#")[0], "permit"
    return plain, mode
