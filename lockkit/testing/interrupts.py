"""When a test may raise KeyboardInterrupt from a signal handler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["is_destructor"]


def is_destructor(frame: FrameType | None) -> bool:
    """
    Tell whether a signal arrived within a ``__del__``.

    CPython lets no exception out of one: it reports it as unraisable, so the interrupt would reach nobody. The handler
    should wait for the next signal instead. (Data model, ``object.__del__``.)

    Args:
        frame: What the handler was given.
    """
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
