"""A space of the conformance suite's own at a server that others use, and how it is emptied afterwards."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from lockkit import url
from lockkit.configuration import registry
from lockkit.configuration.registry import DetachedHost
from lockkit.runtime import drive

__all__ = ["ScratchSpace", "scratch_space"]


@dataclass(frozen=True, slots=True)
class ScratchSpace:
    """
    Where the suite may do what it likes.

    Attributes:
        url: For `lockkit.connect`. **Its text holds the password.**
        options: For `lockkit.connect`, too: those given, and those that make the space its own. **May hold passwords.**
        name: What marks everything in it; None if the backend has no way to keep clients apart.
        above: A directory above it that was not there before.
    """

    url: url.Url = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)
    name: str | None
    above: Path | None = None

    def erase(self) -> None:
        """
        Remove whatever is in it. Blocks.

        Raises:
            LockError: The backend cannot be reached, or does not allow it.
        """
        if self.name is not None:
            drive(self._erase())

    async def _erase(self) -> None:
        host = DetachedHost()
        backend, _ = registry.open_backend(self.url, self.options, host)
        try:
            await backend.erase()
        finally:
            await backend.close()
        if self.above is not None:
            with suppress(OSError):  # somebody else uses it by now
                self.above.rmdir()


def scratch_space(given: url.Url, options: Mapping[str, Any]) -> ScratchSpace:
    """
    Find a space of one's own at a backend: a key prefix, a table, or a directory. No I/O.

    Args:
        given: The backend.
        options: Given beside its URL.

    Raises:
        ConfigurationError: The URL is wrong, or a driver is missing.
    """
    name = f"lockkit_verify_{secrets.token_hex(6)}"
    backend_class = registry.find(given.scheme, options.get("mode", dict(given.query).get("mode")))
    for option in ("prefix", "table"):
        if option in backend_class.options:
            return ScratchSpace(given, {**options, option: name}, name)
    if given.base == "file":
        backend, _ = registry.open_backend(given, options, DetachedHost())
        above = Path(cast("Any", backend).url.removeprefix("file://"))
        made = None if above.exists() else above
        _, question, query = given.text.partition("?")
        return ScratchSpace(url.parse(f"file://{quote(f'{above}/{name}')}{question}{query}"), options, name, made)
    return ScratchSpace(given, options, None)
