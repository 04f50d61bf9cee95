"""What a server says about itself: commands and connections while it is used, version and durability."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Self


class Observer:
    """A server that cannot be asked: no figures. A context manager; made before those who use the server connect."""

    _began = 0.0
    _commands: float | None = None

    def __init__(self, url: str) -> None:
        """Connect; of this class: to nothing."""

    @classmethod
    def can_ask(cls, url: str) -> bool:
        """Whether the server of a URL can be asked, as far as the URL says."""
        del url
        return True

    def begin(self) -> None:
        """Count from now on."""
        self._commands = self.commands()
        self._began = time.monotonic()

    def end(self) -> dict[str, float]:
        """Give ``commands_per_second`` since `begin`, and the ``connections`` that are new since this was made."""
        seconds = time.monotonic() - self._began
        commands, connections = self.commands(), self.connections()
        seen = {} if connections is None else {"connections": max(0.0, connections)}
        if commands is not None and self._commands is not None:
            seen["commands_per_second"] = max(0.0, commands - self._commands) / seconds
        return seen

    def commands(self) -> float | None:
        """
        Give all commands so far, of everybody: meant for a server that nobody else uses meanwhile.

        But for our own questions; None if the server does not tell.
        """
        return None

    def connections(self) -> float | None:
        """Give those that are new since this was made: those of an earlier subject may still be closing."""
        return None

    def about(self) -> dict[str, str]:
        """Give version and settings that matter for speed and durability."""
        return {}

    def close(self) -> None:
        """Disconnect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def watch(url: str) -> Observer:
    """
    Make the observer for a URL; one that gives no figures where the server cannot be asked.

    Raises:
        OSError: The server does not answer, or does not let us in.
    """
    # Loaded when it is wanted: the processes that lock load this module too, and must start quickly.
    made: Observer = import_module("lockkit_tools.bench.observers").observer(url) if url else Observer(url)
    return made
