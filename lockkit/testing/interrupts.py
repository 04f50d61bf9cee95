"""When a test may raise KeyboardInterrupt from a signal handler."""

from __future__ import annotations

from types import FrameType


def must_wait(frame: FrameType | None) -> bool:
    """
    Tell whether a signal arrived where an interrupt would say nothing about lockkit: wait for the next signal then.

    - Within a ``__del__``. CPython lets no exception out of one: it reports it as unraisable, so the interrupt would
      reach nobody (data model, ``object.__del__``). A method that is `__del__` by a second name counts too, also when
      it is called by its first: PyMySQL's ``_force_close`` lets nothing out.
    - Within `logging`. Between ``Handler.acquire`` and its ``try`` the handler's lock would stay taken by this thread,
      and every other thread that logs would hang to the end of the process, long after this test.
    """
    while frame is not None:
        if frame.f_globals.get("__name__") == "logging":
            return True
        if frame.f_code.co_name == "__del__" or _has_second_name(frame):
            return True
        frame = frame.f_back
    return False


def _has_second_name(frame: FrameType) -> bool:
    """Tell whether a frame runs the function that its object's class has as ``__del__``."""
    code = frame.f_code
    if not code.co_argcount:
        return False
    first = frame.f_locals.get(code.co_varnames[0])
    return getattr(getattr(type(first), "__del__", None), "__code__", None) is code
