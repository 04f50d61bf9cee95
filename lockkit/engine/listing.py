"""The names of what is held, a page at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from lockkit.backend import NamesPage, apart, split_space
from lockkit.engine.client_state import ClientState
from lockkit.errors import BackendUnavailable

Kind = Literal["lock", "semaphore", "once"]
"""What has a name: a lock (also an election, a read/write lock), a semaphore, or the key of once."""

SPACE_OF: Mapping[Kind, str] = {"lock": "", "semaphore": "sem", "once": "once"}
"""In which space the names of each kind are, see `apart`; in the order in which people are shown them."""


class Listing:
    """
    One reading of `LockBackend.names`, from the first page to the last.

    It keeps where the next page begins and no connection: dropping it leaves nothing behind.
    """

    def __init__(self, client: ClientState, prefix: str, kind: Kind) -> None:
        """Read nothing yet."""
        self._client = client
        self._prefix = prefix
        self._kind = kind
        self._last: NamesPage | None = None
        self._semaphores: set[str] = set()

    async def page(self) -> Sequence[str] | None:
        """Read the next names; None at the end."""
        space = SPACE_OF[self._kind]
        asked = apart(space, self._prefix) if space else self._prefix
        while self._last is None or self._last.next is not None:
            backend = self._client.ready()
            try:
                page = await backend.names(asked, self._last)
            except BackendUnavailable as error:
                raise self._client.unavailable(error, "list the locks that are held", None) from (
                    error.__cause__ or error
                )
            self._last = page
            names = self._given(page.names) if space else page.names
            if names:
                return names
        return None

    def _given(self, found: Sequence[str]) -> Sequence[str]:
        """Give names of a space as the user knows them; where each slot of a semaphore is a lock, that once."""
        space = SPACE_OF[self._kind]
        names = [split_space(name)[1] for name in found if split_space(name)[0] == space]
        if self._kind != "semaphore" or self._client.capabilities.permits != "slots":
            return names
        bases = dict.fromkeys(name.rpartition("#")[0] for name in names)
        new = [name for name in bases if name.startswith(self._prefix) and name not in self._semaphores]
        self._semaphores.update(new)
        return new
