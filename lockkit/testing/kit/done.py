"""The result of a call that has been done already, and may be awaited all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["Done"]


class Done:
    """What has been done already; may be awaited."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, None]:
        """Return at once."""
        yield from ()
