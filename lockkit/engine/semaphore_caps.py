"""
What operators limit semaphores to (``lockkit limit``), and what other clients do.

All caps of a backend are in one note, so that one question in a while covers every semaphore of a client, however many
there are. A client applies its own change at once, those of others after at most `LOOK_SECONDS`; a permit that is held
stays held.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial
from math import inf
from typing import Any

from lockkit.backend import apart, split_space
from lockkit.background import SingleRun
from lockkit.engine.client_state import ClientState
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.notes import Notes
from lockkit.engine.settings import LIMIT_MAX, LockSettings
from lockkit.engine.slots import slot_name
from lockkit.errors import ConfigurationError, LockError, LockTimeout, Unsupported
from lockkit.units import Instant, Seconds
from lockkit.validation import decode_json, plain

log = logging.getLogger("lockkit")

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
        space, given = split_space(name)
        assert space == "sem", "a lock of the same name has no cap"
        if self._client.capabilities.notes and self._client.runtime.now() - self._known_at >= LOOK_SECONDS:
            # In the background, where calls at the same time share the question.
            await self._asking.start().wait(max(0.0, seconds))
        return self._caps.get(given)

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
        try:
            self._client.runtime.spawn("lockkit-limits", partial(self._compare, name, settings.limit))
        except RuntimeError as error:
            log.debug("comparing limits of semaphore %r: %s", name, error)

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
