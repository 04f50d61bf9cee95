"""Backends that go wrong on command, registered by `tests.cli.support.Cli` for the processes that it starts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, ClassVar

from lockkit.backend import Busy, Grant, Host, NamesPage, Option, Renewal, Renewed, Request
from lockkit.backends.file.backend import FileBackend
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.url import Url


class _Renamed(FileBackend):
    """The file backend under another scheme."""

    @classmethod
    def examiner(cls, url: Url) -> None:  # type: ignore[override]
        """See `LockBackend.examiner`: there are no checks for it."""

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> FileBackend:
        return cls(url.path, host, group=options["group"])


class FaultyBackend(_Renamed):
    """
    ``faulty:///path``: files, until ``/path.acquire``, or another of its calls, exists: then that has no answer.

    Where ``/path.rights`` exists, the rights do not suffice.
    """

    options: ClassVar[Mapping[str, Option]] = {**FileBackend.options, "prefix": Option(str, "Is ignored.")}

    def _answer(self, what: str) -> None:
        if Path(f"{self._directory.path}.rights").exists():
            raise ConfigurationError(f"no rights to {what}")
        if Path(f"{self._directory.path}.{what}").exists():
            raise BackendUnavailable(f"no answer to {what}")

    async def try_acquire(self, request: Request) -> Grant | Busy:
        self._answer("acquire")
        return await super().try_acquire(request)

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        self._answer("renew")
        return await super().renew(grants)

    async def write_note(self, grant: Grant, text: str, keep: float, answer_by: float = inf) -> bool:
        self._answer("note")
        return await super().write_note(grant, text, keep, answer_by)

    async def names(self, prefix: str, after: NamesPage | None = None) -> NamesPage:
        self._answer("names")
        return await super().names(prefix, after)

    async def erase(self) -> None:
        self._answer("erase")
        await super().erase()


class SieveBackend(_Renamed):
    """``sieve:///path``: grants every request."""

    async def try_acquire(self, request: Request) -> Grant | Busy:
        return Grant(request.name, request.owner, time.monotonic_ns(), request.ttl)

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        return [Renewed() for _ in grants]

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        return bool(grant) and answer_by > 0
