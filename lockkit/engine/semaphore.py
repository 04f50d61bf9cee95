"""
Semaphores: permits, slots, and the caps that operators set (``lockkit limit``).

Where the backend counts permits, a permit is one acquisition, within the caller's limit and the cap. Where it has locks
only, there is a lock for each slot, of which a holder has one. A permit is the first of the slots' locks that is free.
If none is, lockkit waits for one of them, chosen at random, and for another one after `SLICE_SECONDS`: so whichever is
released first has a waiter before long. Where the call's time is too short for all of them, they follow on the first
from a random one, so that a later call tries others.

A majority that counts permits would grant too many: with five Redlock nodes and two permits, three clients can each
have two nodes that no other two of them share. A lock for each slot has one holder by the same proof as any lock.

All caps of a backend are in one note, so that one question in a while covers every semaphore of a client, however many
there are. A client applies its own change at once, those of others after at most `LOOK_SECONDS`; a permit that is held
stays held.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Generic, TypeVar, cast

from lockkit.backend import CALL_SECONDS, Busy, LockBackend, SlotName, apart, split_space
from lockkit.background import SingleRun
from lockkit.engine.acquisition import ANSWER_GRACE, Acquisition, AcquisitionContext
from lockkit.engine.client_state import ClientState
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.lookup import Notes
from lockkit.engine.settings import LIMIT_MAX, LockSettings
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockTimeout, Unsupported
from lockkit.runtime import Runtime
from lockkit.units import Instant, Seconds
from lockkit.validation import decode_json, plain

log = logging.getLogger("lockkit")

SLOT_NAME_BYTES_MAX = 240
"""Longest name of a semaphore, UTF-8 bytes, where the number of the slot is added to it."""

SLICE_SECONDS = 0.5
"""How long a waiter waits for one slot before it looks at all of them again, seconds, about. Longer notices the release
of another slot later; shorter asks the backend more often."""

OUTAGE_PAUSE_SECONDS = 0.25
"""Pause after a round without an answer, seconds, about."""

L = TypeVar("L")


def slot_name(name: str, slot: int) -> str:
    """Name the lock of a slot; `name` is the semaphore's, apart from the locks."""
    assert slot >= 0, "slots are counted from 0"
    return SlotName(f"{name}#{slot}")


def no_free_permit(
    name: str, url: str, limit: int, waited: Seconds, *, advice: str, holder: str = "", tried: int | None = None
) -> str:
    """Say that a semaphore stayed busy; `name` is apart from the locks, `holder` empty if nobody is to be named."""
    state = f"has no free permit, all {limit} are held" + (f" (one by {holder})" if holder else "")
    if tried is not None and tried < limit:
        state = f"gave no permit, there was time to try {tried} of its {limit}"
    plain = split_space(name)[1]
    return f"semaphore {plain!r} at {url} {state}: waited {round(waited, 3):g} s. {advice}"


class PermitAcquisition(Acquisition[L]):
    """As `Acquisition`, with what to tell those who hold permits already."""

    def _advice(self, record: LeaseRecord) -> str:
        if not self._is_own(record):
            return super()._advice(record)
        return "Release that permit first, or pass reentrant=True to semaphore(), here and there, to get it again"

    def _names(self) -> Container[str]:
        """Return the names of the locks of which a holder of a permit has one."""
        return (self._settings.name,)

    def _others_may_release(self) -> bool:
        names, relation = self._names(), self._runtime.relation
        records = self._context.leases.all()
        stuck = [record for record in records if record.grant.name in names and relation(record.acquired_by)]
        return len(stuck) < self._request.limit


class SlotAcquisition(PermitAcquisition[L]):
    """A part of a search: one try at a slot, or a short wait for it."""

    _too_late_error = BackendUnavailable  # as `LockTimeout` it would count as busy

    def __init__(self, search: SlotSearch[L], settings: LockSettings, timeout: Seconds) -> None:
        """Start the clock of this part; what was said in an earlier one is not said again."""
        super().__init__(search.context, search.backend, settings, timeout)
        self._answer_by = min(self._answer_by, search.end)
        self._search = search
        self._waiting, self._warn_at = search.waiting, search.warn_at

    async def run(self, name_holder: bool) -> L:  # noqa: FBT001 - as the base
        search = self._search
        try:
            return await super().run(name_holder)
        finally:
            search.waiting, search.warn_at = self._waiting, self._warn_at

    @property
    def _endless(self) -> bool:
        return self._search.deadline is None

    def _names(self) -> Container[str]:
        return [slot_name(self._search.settings.name, slot) for slot in range(self._settings.limit)]

    def _warn_at_backend(self, waited: Seconds) -> None:
        super()._warn_at_backend(self._began - self._search.began + waited)


class SlotSearch(Generic[L]):
    """One acquisition of a permit where the backend has locks only."""

    def __init__(
        self, context: AcquisitionContext[L], backend: LockBackend, settings: LockSettings, timeout: Seconds | None
    ) -> None:
        """Start the clock."""
        assert settings.mode == "permit", "only semaphores have slots"
        assert settings.limit > 0, "a semaphore without slots would be searched for ever"
        self.context = context
        self.backend = backend
        self._runtime: Runtime = context.client.runtime
        self.settings = settings
        self.began = self._answered_at = self._began_try = self._runtime.now()
        self.deadline = None if timeout is None else self.began + timeout
        self.end = inf if self.deadline is None else self.deadline + ANSWER_GRACE
        # Since the last outage:
        self._tried = 0  # how many slots were busy in the longest round
        self._answer_seconds = 0.0  # how long the last answer took
        self.waiting = False  # a part of it has waited, and the caller was told what there is to tell
        self.warn_at = self.began + settings.ttl

    async def run(self) -> L:
        """Acquire the lock of a slot."""
        while True:
            try:
                if (lease := await self._try_all()) is not None:
                    return lease
                left = inf if self.deadline is None else self.deadline - self._runtime.now()
                if left <= 0:
                    raise self._timed_out()
                slot = self._runtime.random.randrange(self.settings.limit)
                if (lease := await self._try(slot, min(self._jitter(SLICE_SECONDS), left))) is not None:
                    return lease
            except BackendUnavailable:
                now = self._runtime.now()
                end = self.deadline
                if self._tried and end is not None and self._began_try >= end and now >= self.end:
                    raise self._timed_out() from None  # the others answered, and this one had less time than they
                self._tried, self._answer_seconds = 0, 0.0
                if now >= (self._answered_at + self.context.unavailable_after if end is None else end):
                    raise
                pause = self._jitter(OUTAGE_PAUSE_SECONDS)
                await self._runtime.sleep(pause if end is None else min(pause, end - now))

    async def _try_all(self) -> L | None:
        """Try the slots, as many as there is time for; None if they stayed busy."""
        limit, skipped = self.settings.limit, 0
        for number in range(limit):
            if self._runtime.now() + self._answer_seconds > self.end:
                return None
            slot = 1 + (number - 1 + skipped) % (limit - 1) if number else 0
            if (lease := await self._try(slot, 0)) is not None:
                return lease
            self._tried = max(self._tried, number + 1)
            self._answer_seconds = self._answered_at - self._began_try
            if not number and self._answered_at + self._answer_seconds * (limit - 1) > self.end:
                skipped = self._runtime.random.randrange(limit)
        return None

    async def _try(self, slot: int, timeout: Seconds) -> L | None:
        """Try one slot; None if it stayed busy."""
        settings = replace(self.settings, name=slot_name(self.settings.name, slot), mode="exclusive")
        self._began_try = self._runtime.now()
        try:
            lease = await SlotAcquisition(self, settings, timeout).run(name_holder=False)
        except LockTimeout:
            self._answered_at = self._runtime.now()
            return None
        record: LeaseRecord = cast("Any", lease)._record  # noqa: SLF001 - made by make_lease
        record.mode, record.grant.slot = "permit", slot
        return lease

    def _jitter(self, seconds: Seconds) -> Seconds:
        return seconds * self._runtime.random.uniform(0.5, 1.5)

    def _timed_out(self) -> LockTimeout:
        settings, url, waited = self.settings, self.context.client.url, self._runtime.now() - self.began
        message = no_free_permit(
            settings.name, url, settings.limit, waited, advice="Wait longer with timeout=.", tried=self._tried
        )
        return LockTimeout(message, name=split_space(settings.name)[1], backend=url)


CAPS_NAME = apart("limit", "semaphores")
"""The lock whose note has the caps; held to change them."""

LOOK_SECONDS = 5.0
"""How old a client's knowledge of the caps may be, seconds. Longer delays what the operator wants; shorter asks the
backend more often."""

KEEP_SECONDS = 10 * 366 * 86400.0
"""Life of the caps, seconds, from the last change on."""

COMPARE_SECONDS = 1.0
"""Least pause between two looks for other limits, seconds: a client of many semaphores makes few."""

COMPARED_MAX = 1000
"""How many semaphores are remembered as compared. With more, one may be compared, and warned of, again."""

COMPARED_SLOTS_MAX = 10
"""How many slots are looked at to compare limits, where each is a lock. More costs requests; with fewer, another limit
may be overlooked."""

LIMIT_KEY = "semaphore_limit"
"""Where the metadata of a permit has the limit under which it was granted."""


def with_limit(metadata: str, limit: int) -> str:
    """Add the limit of a semaphore to the metadata of its permits."""
    assert limit > 0, "the user's own limit, not an operator's cap"
    return json.dumps({**json.loads(metadata or "{}"), LIMIT_KEY: limit})


def limit_of(metadata: Mapping[str, Any]) -> int:
    """Read the limit of a semaphore from the metadata of a permit; 0 if a foreign client has written something else."""
    limit = metadata.get(LIMIT_KEY)
    return limit if type(limit) is int and 0 < limit <= LIMIT_MAX else 0


class SemaphoreCaps:
    """The caps as one client knows them."""

    def __init__(self, client: ClientState, notes: Notes) -> None:
        """Know nothing yet."""
        self._client = client
        self._notes = notes
        self._caps: Mapping[str, int] = {}
        self._known_at = -inf
        self._refused_level = logging.WARNING  # once
        self._compared: set[str] = set()
        self._compared_at = -inf
        self.forked()

    def forked(self) -> None:
        """Wait for no answer to the parent."""
        self._asking = SingleRun(self._client.runtime, "lockkit-caps", self._ask)

    def require(self, name: str) -> None:
        """Check that semaphores of this backend can be capped."""
        capabilities = self._client.capabilities
        if not capabilities.notes or capabilities.permits != "native":
            url = self._client.url
            message = (
                f"{url} cannot cap semaphore {name!r}: that needs notes and native permits (capabilities.notes, "
                "capabilities.permits)"
            )
            raise Unsupported(message, name=name, backend=url)

    async def read(self) -> dict[str, int]:
        """Ask for all caps."""
        note = await self._notes.read(CAPS_NAME)
        try:
            caps = {} if note is None else decode_json(note.text)
        except ValueError as error:
            caps = error
        good = {
            name: cap
            for name, cap in (caps.items() if isinstance(caps, dict) else ())
            if type(cap) is int and 0 <= cap <= LIMIT_MAX
        }
        if not isinstance(caps, dict) or len(good) < len(caps):
            log.warning(
                "not all caps of semaphores at %s were written by lockkit: what is no cap is ignored. Set them anew "
                "with lockkit limit", self._client.url,
            )  # fmt: skip
        return good

    async def write(self, record: LeaseRecord, name: str, cap: int | None) -> None:
        """Change one cap."""
        assert record.grant.name == CAPS_NAME, "else two changes could undo one another"
        caps = await self.read()
        caps.pop(name, None)
        if cap is not None:
            caps[name] = cap
        await self._notes.write(record, json.dumps(caps), KEEP_SECONDS)
        self._learn(caps, self._client.runtime.now())
        self._client.wake()  # the calls that wait because it was 0

    async def cap(self, name: str, seconds: Seconds) -> int | None:
        """Return the cap of a semaphore, None without one."""
        assert split_space(name)[0] == "sem", "a lock of the same name has no cap"
        if self._client.capabilities.notes and self._client.runtime.now() - self._known_at >= LOOK_SECONDS:
            # In the background, where calls at the same time share the question.
            await self._asking.start().wait(max(0.0, seconds))
        return self.known(name)

    def known(self, name: str) -> int | None:
        """Return the cap as last heard, without asking."""
        return self._caps.get(split_space(name)[1])

    def look_in(self) -> Seconds:
        """In how many seconds a call that waits looks for another cap; if the last question failed, not at once."""
        left = self._known_at + LOOK_SECONDS - self._client.runtime.now()
        return left if left > 0 else LOOK_SECONDS

    async def _ask(self) -> None:
        asked_at = self._client.runtime.now()
        try:
            self._learn(await self.read(), asked_at)
        except ConfigurationError as error:  # most likely no right to read them: asked again as seldom as others are
            self._known_at = max(self._known_at, asked_at)
            level, self._refused_level = self._refused_level, logging.DEBUG
            log.log(level, "caps of semaphores (lockkit limit) do not apply to this client: %s", error)
        except (LockError, ValueError) as error:
            log.debug("asking for the caps of semaphores: %s", error)

    def _learn(self, caps: Mapping[str, int], asked_at: Instant) -> None:
        """Note the caps; not those of a question from before this client's own change."""
        assert asked_at <= self._client.runtime.now(), "an answer comes after its question"
        if asked_at >= self._known_at:
            self._caps, self._known_at = caps, asked_at

    def paused(self, name: str) -> LockTimeout:
        """Return the error of a wait for a semaphore whose cap is 0."""
        name, url = split_space(name)[1], self._client.url
        message = f"semaphore {name!r} at {url} gives no permits: an operator set its limit to 0 (lockkit limit)"
        return LockTimeout(message, name=name, backend=url)

    # -- other clients -----------------------------------------------------------------------------------------------

    def compare(self, settings: LockSettings) -> None:
        """Look in the background whether other clients use the semaphore with another limit, and warn once if so."""
        assert settings.mode == "permit", "only semaphores have limits"
        name, now = settings.name, self._client.runtime.now()
        if name in self._compared or now - self._compared_at < COMPARE_SECONDS:
            return
        self._compared_at = now
        if len(self._compared) >= COMPARED_MAX:
            self._compared.clear()
        self._compared.add(name)
        self._client.spawn("lockkit-limits", partial(self._compare, name, settings.limit))

    async def _compare(self, name: str, limit: int) -> None:
        assert limit > 0, "the user's own limit, not an operator's cap"
        names = [name]
        if self._client.capabilities.permits == "slots":
            names = [slot_name(name, slot) for slot in range(min(limit, COMPARED_SLOTS_MAX))]
        try:
            backend = self._client.ready()
            holders = [holder for each in names for holder in await backend.holders(each)]
        except LockError as error:
            log.debug("comparing limits of semaphore %r: %s", name, error)
            return
        for holder in holders:
            other = limit_of(holder.metadata)
            if other not in {0, limit}:
                log.warning(
                    "semaphore %r at %s: this client uses limit %d, another one (%s, pid %s) uses %d: the permits are "
                    "shared, and each client counts to its own limit", split_space(name)[1], self._client.url, limit,
                    plain(holder.metadata.get("host"), 64), plain(holder.metadata.get("pid"), 64), other,
                )  # fmt: skip
                return


class CountedAcquisition(PermitAcquisition[L]):
    """A permit where the backend counts them."""

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

    async def _ask(self, started: Instant) -> L | None:
        settings = self._settings
        try:
            self._cap = await self._caps.cap(settings.name, min(CALL_SECONDS, self._answer_by - started))
        except BaseException:
            await self._undo()  # an earlier round may have left a place in the queue
            raise
        if self._cap == 0:
            await self._pause_at_zero()
            return None
        self._request.limit = settings.limit if self._cap is None else min(settings.limit, self._cap)
        assert self._request.limit > 0, "at a cap of 0 the backend is not asked"
        return await super()._ask(self._runtime.now())

    async def _pause_at_zero(self) -> None:
        """Wait until the cap may be another one, without a place in the queue."""
        assert self._cap == 0, "with permits the backend is asked"
        if self._request.state is not None:  # from an earlier round
            await self._undo()
            self._request = self._new_request()
        if self._out_of_time:
            raise self._caps.paused(self._settings.name)
        self._check_open()
        left = inf if self._deadline is None else self._deadline - self._runtime.now()
        await self._client.sleep(min(self._caps.look_in(), left))
        self._check_open()

    def _timed_out(self, busy: Busy | None) -> LockError:
        name = self._settings.name
        return self._caps.paused(name) if self._caps.known(name) == 0 else super()._timed_out(busy)

    def _busy_message(self, holder: str, advice: str = "Wait longer with timeout=, or raise the limit.") -> str:
        waited = self._runtime.now() - self._began
        name, url = self._settings.name, self._client.url
        return no_free_permit(name, url, self._request.limit, waited, holder=holder, advice=advice)

    async def _wait(self, busy: Busy) -> None:
        assert self._request.mode == "permit", "only semaphores have caps"
        if self._cap is not None:  # nobody wakes the waiters when it is raised
            seconds = self._settings.ttl if busy.retry_after is None else busy.retry_after
            busy = replace(busy, retry_after=min(seconds, self._caps.look_in()))
        await super()._wait(busy)
