"""Lock files: by hand, portalocker, filelock. ``url`` is ``file:`` and a directory."""

from __future__ import annotations

import fcntl
import os
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lockkit.units import Seconds
from lockkit.url import parse
from lockkit_tools.bench.adapters.base import AsyncAdapter, BlockingAdapter

_RECORD = b"0123456789abcdef0123456789abcdef 1234567890123456 30.000000"
"""As long as owner, token and expiry: what a lock that can tell its holder must write at the least."""

_FOREVER = 1e6
"""Seconds; the libraries' own timeouts would turn a long wait into an error."""


def _path(url: str, name: str) -> Path:
    return Path(parse(url).path) / name


class Flock(BlockingAdapter):
    """``flock``, read and write the record, unlock: the baseline of a file lock that knows its holder."""

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        return _Flock(_path(self.url, name))


class _Flock:
    """The file stays open from one use to the next."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> Self:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.pread(self._fd, 512, 0)
        os.pwrite(self._fd, _RECORD, 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)


class Portalocker(BlockingAdapter):
    """portalocker's ``Lock``."""

    def __init__(self, url: str, ttl: Seconds) -> None:
        super().__init__(url, ttl)
        self._module: Any = import_module("portalocker")

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        lock: AbstractContextManager[Any] = self._module.Lock(_path(self.url, name), timeout=_FOREVER)
        return lock


class FileLock(BlockingAdapter):
    """filelock's ``FileLock``."""

    def __init__(self, url: str, ttl: Seconds) -> None:
        super().__init__(url, ttl)
        self._module: Any = import_module("filelock")

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        lock: AbstractContextManager[Any] = self._module.FileLock(_path(self.url, name))
        return lock


class AsyncFileLock(AsyncAdapter):
    """filelock's ``AsyncFileLock``."""

    def __init__(self, url: str, ttl: Seconds) -> None:
        super().__init__(url, ttl)
        self._module: Any = import_module("filelock")

    def lock(self, name: str, *, renew: bool = False) -> AbstractAsyncContextManager[Any]:
        del renew
        lock: AbstractAsyncContextManager[Any] = self._module.AsyncFileLock(_path(self.url, name))
        return lock
