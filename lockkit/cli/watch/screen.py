"""The terminal while ``lockkit watch`` has it: the second screen, single keys, and signals as events."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import tty
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Self

from rich.console import Console, ConsoleDimensions
from rich.control import Control
from rich.screen import Screen as Picture

from lockkit.units import Seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_OTHERS: Final = (signal.SIGTSTP, signal.SIGWINCH)
_WOKEN: Final = 0

_KEY: Final = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Z])?|.", re.DOTALL)
"""One key: a character, or the sequence that a terminal sends for an arrow."""


class Screen:
    """
    Has the terminal from ``__enter__`` to ``__exit__``, and gives it back as it was, whatever ends the block.

    Signals do not raise exceptions here: the C handler writes their numbers into a pipe, on which `wait` waits with the
    keys. So none can strike while the terminal is in neither state.
    """

    def __init__(self) -> None:
        """Take nothing yet."""
        self._console = Console()
        self._input = sys.stdin.fileno()
        self._read, self._write = os.pipe()
        self._before: dict[signal.Signals, Any] = {}
        self._mode: list[Any] = []
        self._wakeup = -1

    def __enter__(self) -> Self:
        """Take the terminal. In the main thread."""
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._mode = termios.tcgetattr(self._input)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        try:
            for signum in (*_ENDING, *_OTHERS):
                if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup has it
                    self._before[signum] = signal.signal(signum, _nothing)
            self._show()
        except BaseException:
            self._give_back()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self._give_back()

    def notify(self) -> None:
        """End the `wait` of the main thread. From any thread."""
        with suppress(BlockingIOError, OSError):  # it has enough to wake up for, or is gone
            os.write(self._write, bytes([_WOKEN]))

    def wait(self, seconds: Seconds) -> tuple[list[str], int | None]:
        """Wait for keys, signals and `notify`."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        poll.register(self._input, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(int(max(0.0, seconds) * 1000) + 1)}
        for signum in os.read(self._read, 4096) if self._read in ready else b"":
            if signum in _ENDING:
                return [], signum
            if signum == signal.SIGTSTP:
                self._stop()
        return self._keys() if self._input in ready else ([], None)

    def _keys(self) -> tuple[list[str], int | None]:
        try:
            data = os.read(self._input, 1024)
        except OSError:
            data = b""
        # Without a terminal there are no keys any more.
        return (_KEY.findall(data.decode(errors="replace")), None) if data else ([], signal.SIGHUP)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, now. An exported COLUMNS would be that of the beginning."""
        try:
            width, height = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            width = height = 0
        return width or 80, height or 24  # a serial line does not know

    def draw(self, picture: RenderableType) -> None:
        """Draw over what is shown."""
        width, height = self.size
        self._console.size = ConsoleDimensions(width, height)
        with self._console.capture() as capture:
            self._console.control(Control.home())
            self._console.print(Picture(picture), end="")
        self._put(capture.get())

    # -- to and fro ------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        tty.setcbreak(self._input)
        self._put("\x1b[?1049h\x1b[?25l\x1b[2J")

    def _hide(self) -> None:
        # A terminal that is gone needs nothing.
        with suppress(OSError, termios.error):
            self._put("\x1b[?25h\x1b[?1049l")
        with suppress(OSError, termios.error):
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._mode)

    def _stop(self) -> None:
        """Stop as any other program at Ctrl-Z, and take the terminal again when the user comes back."""
        self._hide()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, _nothing)
        self._show()

    def _give_back(self) -> None:
        self._hide()
        signal.set_wakeup_fd(self._wakeup)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _put(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _nothing(signum: int, frame: FrameType | None) -> None:
    """Handle a signal in Python: its number is in the pipe already."""
    del signum, frame
