"""One acquisition of a native permit: within the caller's limit, and the cap that an operator may have set."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from lockkit.backend import CALL_SECONDS, Busy, LockBackend
from lockkit.engine.acquisition import Acquisition, AcquisitionContext
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.semaphore_caps import LOOK_SECONDS, SemaphoreCaps
from lockkit.engine.settings import LockSettings
from lockkit.engine.slots import no_free_permit
from lockkit.units import Instant, Seconds

L = TypeVar("L")


class PermitAcquisition(Acquisition[L]):
    """As `Acquisition`."""

    __slots__ = ("_cap", "_caps")

    def __init__(
        self,
        context: AcquisitionContext[L],
        backend: LockBackend,
        settings: LockSettings,
        timeout: Seconds | None,
        caps: SemaphoreCaps,
    ) -> None:
        """Start the clock."""
        assert settings.mode == "permit", "anything else is one lock"
        super().__init__(context, backend, settings, timeout)
        self._caps = caps
        self._cap: int | None = None

    async def run(self) -> L:
        self._caps.compare(self._settings)
        return await super().run()

    async def _ask(self, started: Instant) -> L | None:
        settings = self._settings
        self._cap = await self._caps.cap(settings.name, min(CALL_SECONDS, self._answer_by - started))
        if self._cap == 0:
            await self._pause_at_zero()
            return None
        self._request.limit = settings.limit if self._cap is None else min(settings.limit, self._cap)
        assert self._request.limit > 0, "at a cap of 0 the backend is not asked"
        return await super()._ask(self._runtime.now())

    async def _pause_at_zero(self) -> None:
        """Wait until the cap may be another one, without a place in the queue."""
        assert self._cap == 0, "with permits the backend is asked"
        if self._out_of_time:
            raise self._caps.paused(self._settings.name)
        self._check_open()
        left = LOOK_SECONDS if self._deadline is None else self._deadline - self._runtime.now()
        await self._client.sleep(min(LOOK_SECONDS, left) * self._jitter(0.8, 1.0))
        self._check_open()

    def _busy_message(self, holder: str, advice: str = "Wait longer with timeout=, or raise the limit.") -> str:
        waited = self._runtime.now() - self._began
        name, url = self._settings.name, self._client.url
        return no_free_permit(name, url, self._request.limit, waited, holder=holder, advice=advice)

    def _advice(self, record: LeaseRecord) -> str:
        if not self._is_own(record):
            return super()._advice(record)
        return "Release that permit first, or pass reentrant=True to semaphore(), here and there, to get it again"

    def _others_may_release(self) -> bool:
        name, relation = self._settings.name, self._runtime.relation
        records = self._context.leases.all()
        stuck = [record for record in records if record.grant.name == name and relation(record.acquired_by)]
        return len(stuck) < self._request.limit

    async def _wait(self, busy: Busy) -> None:
        assert self._request.mode == "permit", "only semaphores have caps"
        if self._cap is not None:  # nobody wakes the waiters when it is raised
            seconds = self._settings.ttl if busy.retry_after is None else busy.retry_after
            busy = replace(busy, retry_after=min(seconds, LOOK_SECONDS))
        await super()._wait(busy)
