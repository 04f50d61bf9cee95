"""A container image of a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Image:
    """A container image of a server, and how it is run; tags are those of the Compose files."""

    name: str
    port: int
    url: str
    """With ``{address}`` where host and port go."""
    ask: Callable[[str, int], str | None]
    """Asks whether the server at this host and port is ready."""
    env: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] | None = None
