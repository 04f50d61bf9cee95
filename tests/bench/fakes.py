"""Subjects that misbehave, each in one way."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

from lockkit_tools.bench.adapters.base import Adapter, AsyncAdapter, Bracket, Library
from lockkit_tools.bench.adapters.files import Flock
from lockkit_tools.bench.subject import Face, Kind, Role, Scope, Subject


def subject(
    adapter: str,
    directory: Path,
    *,
    face: Face = "blocking",
    role: Role = "peer",
    scope: Scope = "machine",
    number: int = 1,
    renews: bool = False,
) -> Subject:
    """A subject whose adapter is a class of this module."""
    return Subject(
        label=adapter,
        target=f"tests.bench.fakes:{adapter}",
        url=f"file://{directory}",
        group="here",
        face=face,
        role=role,
        scope=scope,
        number=number,
        renews=renews,
    )


class Good(Flock):
    """A lock."""


class Leaky(Adapter):
    """Lets everybody in."""

    def lock(self, name: str) -> Library:
        del name
        return nullcontext()


class LeakyPrimitives(Leaky):
    """Lets all writers in, and permits without number."""

    def primitive(self, kind: Kind, name: str, count: int = 1) -> Library:
        del kind, count
        return self.lock(name)


class LeakyAsync(Leaky, AsyncAdapter):
    """Lets every task in."""


class Backwards(Flock):
    """A lock whose tokens are all the same."""

    def token(self, entered: Library) -> int | None:
        del entered
        return 7


class Raising(Adapter):
    """Cannot be entered."""

    def lock(self, name: str) -> Library:
        def enter() -> None:
            raise RuntimeError(f"no lock {name[:7]} today")

        return Bracket(enter, enter)


class Noting(Flock):
    """Notes which process uses which lock."""

    def lock(self, name: str) -> Library:
        Path(self.url.removeprefix("file://"), f"{name}.{os.getpid()}").touch()
        return super().lock(name)


class Connecting(Flock):
    """Connects with its first lock."""

    connected = False

    def lock(self, name: str) -> Library:
        lock = super().lock(name)

        def enter() -> Library:
            if not self.connected:
                time.sleep(3)
                self.connected = True
            return lock.__enter__()

        return Bracket(enter, lambda: lock.__exit__(None, None, None))


class Dying(Adapter):
    """Ends its process with a last word."""

    async def open(self) -> None:
        sys.stderr.write("out of luck\n")
        sys.stderr.flush()
        os._exit(3)

    def lock(self, name: str) -> Library:
        raise NotImplementedError


class Hanging(Adapter):
    """Never gets the lock, and does not end when asked to."""

    def lock(self, name: str) -> Library:
        del name
        threading.Event().wait()
        raise NotImplementedError


class Losing(Flock):
    """Loses every second lock that it holds."""

    def still_held(self, lock: Library, entered: Library) -> bool | None:
        del entered
        return id(lock) in self._kept

    def lock(self, name: str) -> Library:
        lock = super().lock(name)
        if name.endswith(("0", "2", "4", "6", "8")):
            self._kept.add(id(lock))
        return lock

    async def open(self) -> None:
        self._kept: set[int] = set()
