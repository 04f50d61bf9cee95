"""The result of a call that has been done already, and may be awaited all the same."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

__all__ = ["Done"]


class Done:
    """What has been done already; may be awaited."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, None]:
        """Return at once."""
        yield from ()
