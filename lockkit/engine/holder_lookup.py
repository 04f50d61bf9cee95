"""Who holds a lock, for the error of a wait that timed out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from lockkit.backend import LockBackend, decode_metadata
from lockkit.engine.client_state import ClientState
from lockkit.errors import LockError, LockHolder
from lockkit.runtime import Event
from lockkit.units import Seconds

log = logging.getLogger("lockkit")


def holder_of(owner: str, metadata: Mapping[str, object] | str | None) -> LockHolder:
    """Describe a holder."""
    about = decode_metadata(metadata) if metadata is None or isinstance(metadata, str) else metadata
    host, pid, text = about.get("host"), about.get("pid"), about.get("text")
    return LockHolder(
        owner,
        host if isinstance(host, str) else None,
        pid if type(pid) is int else None,
        text if isinstance(text, str) else None,
        dict(about),
    )


class HolderLookups:
    """Asks for holders in the background: calls that time out together share one request."""

    __slots__ = ("_client", "_pending")

    def __init__(self, client: ClientState) -> None:
        """Start without requests."""
        self._client = client
        self._pending: dict[str, _Lookup] = {}

    def forked(self) -> None:
        """Forget the parent's requests."""
        self._pending = {}

    async def ask(self, backend: LockBackend, name: str, seconds: Seconds) -> LockHolder | None:
        """Ask who holds a lock."""
        runtime, lookup = self._client.runtime, self._pending.get(name)
        if lookup is None or lookup.done.is_set():
            lookup = _Lookup(runtime.event())
            try:
                runtime.spawn("lockkit-holder", partial(lookup.run, backend, name))
            except RuntimeError as error:
                log.debug("asking for the holder of lock %r: %s", name, error)
                return None
            self._pending[name] = lookup
        try:
            await lookup.done.wait(seconds)
        finally:
            if self._pending.get(name) is lookup:
                self._pending.pop(name, None)
        return lookup.holder


class _Lookup:
    """One request, and its answer."""

    __slots__ = ("done", "holder")

    def __init__(self, done: Event) -> None:
        self.done = done
        self.holder: LockHolder | None = None

    async def run(self, backend: LockBackend, name: str) -> None:
        assert not self.done.is_set(), "asked once"
        try:
            for holder in await backend.holders(name):
                self.holder = holder_of(holder.owner, holder.metadata)
                break
        except LockError as error:
            log.debug("asking for the holder of lock %r: %s", name, error)
        finally:
            self.done.set()
