"""The names of the locks that are held, a page at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockkit.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockkit.backend import NamesPage
    from lockkit.engine.client_state import ClientState

__all__ = ["Listing"]


class Listing:
    """
    One reading of `LockBackend.names`, from the first page to the last.

    It keeps where the next page begins and no connection: dropping it leaves nothing behind.
    """

    def __init__(self, client: ClientState, prefix: str) -> None:
        """
        Read nothing yet.

        Args:
            client: Whose backend is asked.
            prefix: Already validated.
        """
        self._client = client
        self._prefix = prefix
        self._last: NamesPage | None = None

    async def page(self) -> Sequence[str] | None:
        """
        Read the next names; None at the end.

        Raises:
            BackendUnavailable: No answer. The next call asks for the same page.
            Unsupported: The backend cannot list its locks.
            LockError: The client is closed.
        """
        while self._last is None or self._last.next is not None:
            backend = self._client.ready()
            try:
                page = await backend.names(self._prefix, self._last)
            except BackendUnavailable as error:
                raise self._client.unavailable(error, "list the locks that are held", None) from error
            self._last = page
            if page.names:
                return page.names
        return None
