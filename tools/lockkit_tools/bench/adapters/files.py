"""Lock files: by hand, portalocker, filelock. ``url`` is ``file:`` and a directory."""

from __future__ import annotations

import fcntl
import os
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from lockkit.url import parse
from lockkit_tools.bench.adapters.base import Adapter, AsyncAdapter, Bracket, Library

_RECORD = b"0123456789abcdef0123456789abcdef 1234567890123456 30.000000"
"""As long as owner, token and expiry: what a lock that can tell its holder must write at the least."""

_FOREVER = 1e6
"""Seconds; portalocker's own timeout would turn a long wait into an error."""


def _path(url: str, name: str) -> Path:
    return Path(parse(url).path) / name


class Flock(Adapter):
    """``flock``, read and write the record, unlock: the baseline of a file lock that knows its holder."""

    def lock(self, name: str) -> Library:
        # It stays open from one use to the next.
        fd = os.open(_path(self.url, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

        def enter() -> None:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.pread(fd, 512, 0)
            os.pwrite(fd, _RECORD, 0)

        return Bracket(enter, lambda: fcntl.flock(fd, fcntl.LOCK_UN))


class _Imported(Adapter):
    """A class of a library that takes a path."""

    target: ClassVar[tuple[str, str]]

    async def open(self) -> None:
        module, name = self.target
        self._make: Library = getattr(import_module(module), name)

    def lock(self, name: str) -> Library:
        return self._make(_path(self.url, name))


class Portalocker(_Imported):
    """portalocker's ``Lock``."""

    target = ("portalocker", "Lock")

    def lock(self, name: str) -> Library:
        return self._make(_path(self.url, name), timeout=_FOREVER)


class FileLock(_Imported):
    """filelock's ``FileLock``."""

    target = ("filelock", "FileLock")


class AsyncFileLock(_Imported, AsyncAdapter):
    """filelock's ``AsyncFileLock``."""

    target = ("filelock", "AsyncFileLock")
