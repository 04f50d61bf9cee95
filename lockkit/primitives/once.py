"""
Once: a piece of work that is done at most once per key, as long as its record is kept.

A key is absent, running, or done. *Running* is a lock, apart from the locks of the same name, under a lease that is
renewed: a slow first run is not overtaken, and a crashed one runs again after its ttl. *Done* is a note on that lock
(`lockkit.engine.lookup`), which only the present holder can write. The holder releases the lock after that.

::

    read the note ── done? ──> the stored result                 one round trip, no lock
      ^  │
      │  └──> acquire, waiting for a run under way ──> read the note again ── done? ──> release, the stored result
      │                                                     │
      └──────────────── lease lost meanwhile? ──────────────┴──> run ──> write the note ──> release

What it cannot promise: a crash after the work and before the note runs the work again. So give `Attempt.key`, the same
for all attempts, to whatever does the work, if that can recognise repeats itself.

Source: idempotency keys, as in the IETF draft "The Idempotency-Key HTTP Header Field" (J. Jena, S. Dalal), with the
record in progress held by a lease instead of an expiry that is never renewed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from math import inf
from typing import Any, ClassVar

from lockkit import validation
from lockkit.backend import Holder, Note, apart
from lockkit.configuration.name_template import NameTemplate
from lockkit.engine.acquisition import ANSWER_GRACE, UNDO_SECONDS_MIN
from lockkit.engine.cleanup import RELEASE_SECONDS
from lockkit.engine.engine import Engine
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.settings import LockSettings
from lockkit.errors import ConfigurationError, KeyReused, LockError, LockLost, StoredError
from lockkit.runtime import wall_clock
from lockkit.units import Instant, Seconds
from lockkit.validation import decode_json, encode_json

log = logging.getLogger("lockkit")

SPACE = "once"
"""The records' space apart from the locks (`lockkit.backend.apart`)."""

FORGET_SECONDS = 1.0
"""How long `forget` waits for calls that are just looking at the done key, seconds."""

FORGOTTEN_SECONDS = 1.0
"""Life of the note that replaces a forgotten record, seconds."""

ERROR_CHARS_MAX = 8000
ERROR_TYPE_CHARS_MAX = 200
"""Longest text and type name of a stored error; the rest is cut off. A character may take six bytes in JSON."""


@dataclass(frozen=True, slots=True)
class OnceRunning:
    """
    The state of a key of once: a run is under way.

    Attributes:
        holder: Who runs it.
    """

    holder: Holder


@dataclass(frozen=True, slots=True)
class OnceDone:
    """
    The state of a key of once: it is done.

    Attributes:
        since: When it was completed, Unix time by the clock of its run; None if an older lockkit has stored it.
        until: When the record ends, Unix time; None if that is not known.
        result: The stored result; None without one, and after an error.
        error: Type name and text of the stored error (``store_errors=``); None if it succeeded.
        match: SHA-256 of the ``match`` of its run, hexadecimal; None without one.
    """

    since: float | None
    until: float | None
    result: Any
    error: tuple[str, str] | None
    match: str | None


def digest(match: str | None) -> str | None:
    """Shorten a ``match`` to what the record keeps of it: it may be long, and nobody else's business."""
    return None if match is None else hashlib.sha256(match.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Once:
    """
    ``client.once``, without the colour of the API: runs a piece of work at most once per key.

    Attributes:
        engine: Of the client.
        lock: Settings of the lock under which the work runs; its name is the key, or the template of one.
        keep: How long a record is kept after its completion, seconds.
        match: What must be the same at each repeat, or the template of it; None for anything.
        store_errors: Classes of the errors that count as completion.
    """

    engine: Engine[Any]
    lock: LockSettings
    keep: Seconds
    match: str | None
    store_errors: tuple[type[BaseException], ...]

    @classmethod
    def described(
        cls,
        engine: Engine[Any],
        key: str,
        *,
        keep: float | timedelta,
        ttl: Seconds | timedelta | None,
        timeout: Seconds | timedelta | None,
        match: str | None,
        store_errors: tuple[type[BaseException], ...] | type[BaseException],
        stall: Seconds | timedelta | None = None,
        label: str | None = None,
    ) -> Once:
        """Validate the arguments of ``client.once``. Nothing is sent."""
        lock, url = engine.settings(key, ttl=ttl, timeout=timeout, stall=stall, label=label), engine.url
        kinds: tuple[Any, ...] = store_errors if isinstance(store_errors, tuple) else (store_errors,)
        given: object = match
        problem = ""
        with validation.about(key, url):
            seconds = validation.lifetime(keep, "keep")
        if not (given is None or isinstance(given, str)):
            problem = f"match must be a str, such as '{{amount}}:{{currency}}', not {validation.shown(given)}"
        elif not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
            problem = f"store_errors must be a tuple of exception classes, not {validation.shown(store_errors)}"
        if problem:
            raise ConfigurationError(problem, name=key, backend=url)
        engine.notes.require("once()")
        return cls(engine, lock, seconds, match, kinds)

    @property
    def key(self) -> str:
        """The key, or the template of one."""
        return self.lock.name

    def named(self, key: str, match: str | None) -> Once:
        """Fill in the templates of key and ``match``."""
        return replace(self, lock=self.engine.named(self.lock, key), match=match)

    async def begin(self) -> Attempt:
        """Find out whether the key is done; if it is not, hold it."""
        runtime, timeout = self.engine.runtime, self.lock.timeout
        began = runtime.now()
        answer_by = inf if timeout is None else began + timeout + ANSWER_GRACE
        _, done = await self._read(answer_by)
        if done is not None:
            return self._repeat(done)
        lease = await self.engine.acquire(replace(self.lock, name=apart(SPACE, self.key)), self.lock.timeout)
        self.engine.leases.enter(lease._record)  # noqa: SLF001 - made by make_lease
        attempt = Attempt(self, lease)
        try:
            note, done = await self._read(answer_by)
            attempt.note = None if note is None else note.text
        except BaseException as error:
            # Not `Attempt.leave`: this is no error of the work, to be stored as its outcome.
            by = max(answer_by, runtime.now() + UNDO_SECONDS_MIN)
            await self.engine.releases.leave(lease._record, error, by)  # noqa: SLF001 - as above
            raise
        if done is None and lease.held:
            return attempt
        await attempt.give_back(max(answer_by, runtime.now() + UNDO_SECONDS_MIN))
        if done is not None:
            return self._repeat(done)
        # The lease ended before this process got the answer (it was stopped): meanwhile another run may have completed.
        left = None if timeout is None else max(0.0, began + timeout - runtime.now())
        return await replace(self, lock=replace(self.lock, timeout=left)).begin()

    async def _read(self, answer_by: Instant = inf) -> tuple[Note | None, OnceDone | None]:
        """Read the note on the key; and what it says, if that is a completion."""
        note = await self.engine.notes.read(apart(SPACE, self.key), answer_by)
        return note, None if note is None else decode(note.text, self.key, self.engine.url)

    async def state(self) -> OnceRunning | OnceDone | None:
        """Look at the key, without running anything."""
        note, done = await self._read()
        if note is None or done is None:
            holders = await self.engine.holders_in(SPACE, self.key)
            return OnceRunning(holders[0]) if holders else None
        return done if note.remaining is None else replace(done, until=wall_clock() + note.remaining)

    async def forget(self) -> bool:
        """Forget that the key is done: the next call runs again. A run that is under way is left alone."""
        if not isinstance(await self.state(), OnceDone):
            return False
        settings = replace(self.lock, name=apart(SPACE, self.key), on_lost=None, reentrant=False)
        lease = await self.engine.try_acquire(settings, FORGET_SECONDS)
        if lease is None:
            return False  # a call under way is about to find it done, or another one forgets it
        attempt = Attempt(self, lease)
        try:
            done = isinstance(await self.state(), OnceDone)
            if done:
                await attempt.write('{"done":0}', FORGOTTEN_SECONDS)
        except BaseException as error:
            await self.engine.releases.leave(lease._record, error)  # noqa: SLF001 - as in `begin`
            raise
        await attempt.leave(None)
        return done

    def _repeat(self, outcome: OnceDone) -> Attempt:
        key, url = self.key, self.engine.url
        match = digest(self.match)
        if match is not None and outcome.match is not None and match != outcome.match:
            message = (
                f"once {key!r} at {url} was done with another match: the key stands for two different things. Use "
                "different keys for them"
            )
            raise KeyReused(message, name=key, backend=url)
        if outcome.error is not None:
            type_name, text = outcome.error
            stored = StoredError(f"once {key!r} at {url} ended with {type_name}: {text}", name=key, backend=url)
            stored.type_name, stored.text = type_name, text
            raise stored
        return Attempt(self, None, outcome.result)


class Call:
    """A decorated function: the key and the ``match`` of each of its calls."""

    __slots__ = ("_match", "_once", "template")

    def __init__(self, once: Once, function: Callable[..., Any]) -> None:
        """Check the fields against the function's parameters."""
        url = once.engine.url
        self._once = once
        self.template = NameTemplate(once.key, function, backend=url)
        self._match = None if once.match is None else NameTemplate(once.match, function, backend=url)

    def named(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Once:
        """Fill in the templates for one call."""
        match = None if self._match is None else self._match.name(arguments, keywords)
        return self._once.named(self.template.name(arguments, keywords), match)


class Attempt:
    """
    One attempt at the work of a key.

    Attributes:
        first: The work is to be done now: it is not known to be done.
        lease: Holds the key while the work is done; None if nothing is to be done, or it is done.
        result: The stored result, or what `done` was called with.
        note: The text on the lock when it was acquired, if that was no completion.
    """

    __slots__ = ("_completing", "_once", "first", "lease", "note", "result")

    def __init__(self, once: Once, lease: Any | None, result: Any = None) -> None:  # noqa: ANN401 - any JSON
        """Begin."""
        self._once = once
        self.lease = lease
        self._completing = False
        self.first = lease is not None
        self.result = result
        self.note: str | None = None

    @property
    def key(self) -> str:
        """The key: the same for each attempt."""
        return self._once.key

    def _record(self, what: str) -> LeaseRecord:
        if self.lease is None:
            url = self._once.engine.url
            if not self.first:
                why = "it was done before: look at attempt.first"
            else:
                why = "it is done already" if self._completing else "its block has ended, and the key is not done"
            raise LockError(f"once {self.key!r} at {url} cannot {what}: {why}", name=self.key, backend=url)
        record: LeaseRecord = self.lease._record  # noqa: SLF001 - the attempt and its lease are one unit
        return record

    def beat(self) -> None:
        """Note that the run makes progress; without one under way there is nothing to note."""
        if self.lease is not None:
            self._once.engine.beat(self._record("make progress"))

    async def done(self, result: Any) -> None:  # noqa: ANN401 - any JSON
        """Note that the work is done, and free the key."""
        record, outcome, problem = self._record("be completed"), "", None
        self._completing = True
        try:
            outcome = encode_json(result)
        except ValueError as error:
            problem = error
        await self._complete(record, f'"result":{outcome or "null"}')
        self.result = result
        if problem is not None:
            message = f"once {self.key!r} ran and is done, but its result is not stored: {problem}"
            raise ConfigurationError(message, name=self.key, backend=self._once.engine.url) from problem

    async def write(self, text: str, keep: Seconds) -> None:
        """Write a note that is no completion, such as a count of attempts. See `lockkit.engine.lookup.Notes.write`."""
        await self._once.engine.notes.write(self._record("be noted"), text, keep)

    async def _complete(self, record: LeaseRecord, outcome: str, answer_by: Instant = inf) -> None:
        match = json.dumps(digest(self._once.match))
        keep = self._once.keep
        text = f'{{"done":1,"match":{match},"since":{wall_clock():.3f},"keep":{keep:.3f},{outcome}}}'
        await self._once.engine.notes.write(record, text, keep, answer_by)
        await self.give_back(answer_by)

    async def give_back(self, answer_by: Instant = inf) -> None:
        """Free the key after its completion. That it was lost in between matters no more: nobody runs a done key."""
        lease, self.lease = self.lease, None
        assert lease is not None, "completed by its holder"
        try:
            await self._once.engine.releases.leave(lease._record, None, answer_by)  # noqa: SLF001 - as above
        except LockLost as error:
            log.debug("once %r: %s", self.key, error)

    async def leave(self, error: BaseException | None) -> None:
        """End the attempt: store an error that is to be stored, otherwise free a key that is not done."""
        if self.lease is None:
            return
        engine, record = self._once.engine, self._record("be left")
        answer_by = engine.runtime.now() + RELEASE_SECONDS  # for the note and the release together
        try:
            # Not what `done` raised: the work had succeeded, and its result may be stored already.
            if not self._completing and error is not None and isinstance(error, self._once.store_errors):
                await self._complete(record, f'"error":{encode_error(error)}', answer_by)
        except LockError as failed:
            assert error is not None, "only an error is stored"
            error.add_note(f"lockkit: {failed}")
        finally:
            # Also if storing the error was cancelled, or it has no text: else it would be renewed for ever.
            lease, self.lease = self.lease, None  # kept until the release: a lease that is dropped is not released
            if lease is not None:
                await engine.releases.leave(record, error, answer_by)
            del lease


class BaseAttempt:
    """One attempt at the work of a key: what it knows without asking, in both APIs."""

    __slots__ = ("_attempt",)
    _api: ClassVar[str]

    def __init__(self, attempt: Attempt) -> None:
        """Made by ``with client.once(…)``."""
        self._attempt = attempt

    @property
    def first(self) -> bool:
        """The key is not known to be done: do the work, and call `done`."""
        return self._attempt.first

    @property
    def key(self) -> str:
        """The key, the same for each attempt: give it to a provider that recognises repeats itself."""
        return self._attempt.key

    def beat(self) -> None:
        """
        Say that the work makes progress, where ``client.once`` has ``stall=``. As ``Lease.beat``, of the run's lease.

        Raises:
            LockLost: The run has lost it: another attempt may run.
        """
        self._attempt.beat()

    @property
    def result(self) -> Any:  # noqa: ANN401 - any JSON
        """The stored result, or what `done` was called with; None without one."""
        return self._attempt.result

    def __repr__(self) -> str:
        """Show key and state."""
        return f"<{self._api}.Attempt {self.key!r} {'first' if self.first else 'repeat'}>"


def encode_error(error: BaseException) -> str:
    """Turn an error into the JSON text of its type's name and its text."""
    text = str(error).encode("utf-8", "replace").decode()[:ERROR_CHARS_MAX]
    return json.dumps([type(error).__qualname__[:ERROR_TYPE_CHARS_MAX], text], ensure_ascii=False)


def decode(text: str, key: str, url: str) -> OnceDone | None:
    """Read a note; None if it is no completion."""
    try:
        value = decode_json(text)
        if value["done"] == 0:
            return None
        error = value.get("error")
        stored = None if error is None else (str(error[0]), str(error[1]))
        since, keep = (each if type(each) is float else None for each in map(value.get, ("since", "keep")))
        until = None if since is None or keep is None else since + keep
        return OnceDone(since, until, value.get("result"), stored, value.get("match"))
    except (ValueError, TypeError, LookupError) as error:
        message = f"the record of once {key!r} at {url} was not written by this version of lockkit: {error!r}"
        raise LockError(message, name=key, backend=url) from error
