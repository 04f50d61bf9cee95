"""Which backend to test: a value that makes sync and async clients, here and in other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import lockkit
from lockkit import aio, sync, url
from lockkit.backend import Host, LockBackend
from lockkit.configuration import registry
from lockkit.engine.engine import Engine
from lockkit.runtime import AsyncioRuntime, BlockingRuntime

Face = Literal["blocking", "asyncio"]
"""Which API a case uses: the sync one or the async one."""


@dataclass(frozen=True, slots=True)
class Target:
    """
    A backend under test. Can be pickled, so that other processes connect to the same.

    Attributes:
        url: As for `lockkit.connect`.
        options: As for `lockkit.connect`.
        backend: ``module:Class`` of a backend that no entry point registers; the module must be importable in a new
            Python process with this one's ``sys.path``. None: the URL's scheme decides.
    """

    url: str = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    backend: str | None = None

    def connect(self, **options: Any) -> lockkit.Client:
        """Make a blocking client; `options` win over the target's."""
        given = {**self.options, **options}
        if self.backend is None:
            return lockkit.connect(self.url, **given)
        return sync.Client(Engine(partial(self._open, given), BlockingRuntime(), sync.Lease))

    def connect_aio(self, **options: Any) -> aio.Client:
        """Make an asyncio client; `options` win over the target's."""
        given = {**self.options, **options}
        if self.backend is None:
            return aio.connect(self.url, **given)
        return aio.Client(Engine(partial(self._open, given), AsyncioRuntime(), aio.Lease))

    def _open(self, given: Mapping[str, Any], host: Host) -> tuple[LockBackend, dict[str, Any]]:
        """Do what `registry.open_backend` does, with a class that the registry does not know."""
        parsed = url.parse(self.url)
        backend_class = registry.load(parsed.scheme, self.backend or "", "Name it as module:Class")
        engine_options, options = registry.split_options(backend_class, parsed, given)
        return backend_class.open(parsed, options, host), engine_options
