"""A backend of a stranger's, typed as lockkit's own are. Only type-checked, never run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, ClassVar

from lockkit.backend import (
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    Host,
    LockBackend,
    Option,
    Renewal,
    Renewed,
    Request,
    Unknown,
)
from lockkit.url import Url


class Stranger(LockBackend):
    """Implements what must be implemented."""

    options: ClassVar[Mapping[str, Option]] = {"depth": Option(parse=int, help="How deep.", default=1)}

    def __init__(self, host: Host, depth: int) -> None:
        self._runtime = host.runtime
        self._depth = depth

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> Stranger:
        """No I/O."""
        del url
        return cls(host, options["depth"])

    @property
    def url(self) -> str:
        """For messages."""
        return "stranger://"

    async def try_acquire(self, request: Request) -> Grant | Busy:
        """Granted to whoever has patience."""
        await self._runtime.sleep(0.0)
        if request.queue:
            return Busy(retry_after=1.0, poll=True, owner="somebody")
        return Grant(request.name, request.owner, token=1, ttl=request.ttl, anchor=self._runtime.now())

    async def abandon(self, request: Request) -> None:
        """Nothing to leave."""

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """All three outcomes."""
        outcomes: list[Renewal] = [Renewed(anchor=1.0), Gone("taken"), Unknown(OSError())]
        return outcomes[: len(grants)]

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        """Ours."""
        return grant.token > 0 and answer_by > 0

    async def holders(self, name: str) -> Sequence[Holder]:
        """Somebody."""
        return [Holder(owner=name, token=None, remaining=None)]

    async def break_lock(self, name: str) -> bool:
        """Free."""
        return bool(name)

    async def ping(self) -> None:
        """Here."""

    async def close(self) -> None:
        """Nothing kept."""


Busy("soon")  # type: ignore[arg-type]
Gone("why not")  # type: ignore[arg-type]
Capabilities(min_ttl=1.0)  # type: ignore[call-arg]
