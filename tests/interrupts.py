"""Ctrl-C at an instant of the test's choice, and looks whether other threads go on."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from lockkit.testing.timing import PATIENCE

ENTER = threading.Condition.__enter__.__code__
EXIT = threading.Condition.__exit__.__code__


class _Strike:
    """Raises KeyboardInterrupt in this thread at one of many instants, as Python may between any two instructions."""

    def __init__(self, number: int) -> None:
        """Strike at the `number`-th of those instants; the first is 0."""
        self._left = number
        self.struck = False

    def during(self, function: Callable[[], object]) -> None:
        """Call, and catch the interrupt. If it was not `struck`, there were no more instants."""
        former = sys.gettrace()
        # Python 3.12 sends events of instructions only if some frame wants them when tracing begins.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._look)
        try:
            function()
            assert not self.struck, "the interrupt was swallowed"
        except KeyboardInterrupt:
            assert self.struck
        finally:
            sys.settrace(former)

    def _look(self, frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ANN401 - see sys.settrace
        raise NotImplementedError

    def _perhaps(self) -> None:
        if self._left == 0:
            self.struck = True
            raise KeyboardInterrupt
        self._left -= 1


class LockStrike(_Strike):
    """While a library has one of its locks but no ``with`` to free it: after it was taken, before it is freed."""

    def __init__(self, number: int, library: str) -> None:
        """As `_Strike`; `library` is its directory."""
        super().__init__(number)
        self._library = f"{os.sep}{library}{os.sep}"

    def _look(self, frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ANN401 - see sys.settrace
        del event, argument
        caller = frame.f_back
        if caller is None or self._library not in caller.f_code.co_filename:
            return None
        if frame.f_code is EXIT:
            self._perhaps()
        return self._leaving if frame.f_code is ENTER else None

    def _leaving(self, frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ANN401 - see sys.settrace
        del frame, argument
        if event == "return":
            self._perhaps()
        return self._leaving


class OpcodeStrike(_Strike):
    """Before each instruction of some functions."""

    def __init__(self, number: int, *codes: CodeType) -> None:
        """As `_Strike`."""
        super().__init__(number)
        self._codes = codes

    def _look(self, frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ANN401 - see sys.settrace
        del argument
        if frame.f_code not in self._codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._perhaps()
        return self._look


def elsewhere(function: Callable[[], object]) -> bool:
    """Call in another thread; tell whether that came to an end, and well."""
    done = threading.Event()

    def call() -> None:
        function()
        done.set()

    threading.Thread(target=call, daemon=True).start()
    return done.wait(PATIENCE)
