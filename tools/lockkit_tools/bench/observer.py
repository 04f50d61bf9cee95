"""What a server says about itself: commands and connections while it is used, version and durability."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Observer:
    """A server that cannot be asked: no figures. A context manager; made before those who use the server connect."""

    def begin(self) -> None:
        """Count from now on."""

    def end(self) -> dict[str, float]:
        """Give ``commands_per_second`` since `begin`, and the ``connections`` that are new since this was made."""
        return {}

    def about(self) -> dict[str, str]:
        """Give version and settings that matter for speed and durability."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
