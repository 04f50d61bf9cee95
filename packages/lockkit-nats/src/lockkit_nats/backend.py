"""Locks in a JetStream key-value bucket."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, inf
from typing import TYPE_CHECKING, Any, TypeVar

import nats.errors
import nats.js.errors
from nats.js.api import AckPolicy, DeliverPolicy

from lockkit.backend import (
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    LockBackend,
    Renewed,
    Unknown,
    decode_metadata,
    seconds_left,
)
from lockkit.drivers import DriverLoop
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit_nats.connection import CONNECT_SECONDS, Connection

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from datetime import datetime

    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from lockkit.backend import Host, Renewal, Request
    from lockkit.url import Url

T = TypeVar("T")

CLOCK_KEY = "clock"
KEPT_SECONDS = 3600
"""After which time the server deletes the key of a lease that has ended or was released, if it can. Longer keeps more
keys; shorter could let a write in that was under way for as long, and expects a key that was never written."""

WATCHER_SECONDS = 5.0
"""How long the server keeps the consumer of a waiter that has gone, seconds. Longer leaves more of them behind; shorter
ends the watch of a client that only reconnects."""

SILENT_SECONDS = 2.0
"""How long nothing may come from the server before calls that are not answered give up the connection, seconds. More
leaves them on one that is dead; less gives up servers that are only slow."""

DRIVER_ERRORS = (OSError, TimeoutError, nats.errors.Error)

_OPERATION = "KV-Operation"
# Of what a client writes in place of a key that it deletes, and nats-server 2.11 of one that it deletes for its age.
_DELETED = (_OPERATION, "Nats-Marker-Reason")
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
# `err_code` of the API.
_NO_MESSAGE = 10037
_WRONG_REVISION = frozenset({10071, 10164})


class WrongRevision(Exception):
    """The key has been written since it was read."""


@dataclass(frozen=True, slots=True)
class Record:
    """
    What stands under a key.

    Attributes:
        revision: Sequence number of the message in the stream.
        written: When the server stored it, by its own clock.
        owner: Who holds the lock; None if it was released.
        token: Revision of the acquisition; later ones are renewals.
        ttl: For how long from `written` on, seconds.
        metadata: As `Request.metadata`.
    """

    revision: int
    written: datetime
    owner: str | None
    token: int
    ttl: float
    metadata: str


@dataclass(slots=True)
class Attempt:
    """
    What a request remembers.

    Attributes:
        expected: Revision that its latest write expects; None if no write is on its way.
        replaced: Owner of the record with that revision, whose lease had ended; None if there was none.
        watch: While the request waits, the subscription to what is written to the key, once it is made; else None.
    """

    expected: int | None = None
    replaced: str | None = None
    watch: list[Subscription] | None = None


@dataclass(slots=True)
class Held:
    """
    What a grant remembers.

    Attributes:
        revision: The latest of its record.
        metadata: What to write again with each renewal.
        connection: Which one of the client's brought the revision. A server that has lost its data counts from 1 again,
            so after an outage another owner's record may have that revision.
    """

    revision: int
    metadata: str
    connection: int


class NatsBackend(LockBackend):
    """
    Locks in a JetStream key-value bucket.

    A key holds the record of a lock. Each step is a write that the server accepts only if the key still has the
    revision that was read before. The server's clock decides when a lease has ended: it stamps every message, so the
    time now is the stamp of a message that was written just now.
    """

    capabilities = Capabilities(
        crash_release="ttl",
        min_ttl=0.1,
        ttl_granularity=0.0,
        fair=False,
        wakeup="push",
        token_source="the sequence number of the bucket's stream; it starts again if the stream is deleted",
        survives_node_loss=False,
        survives_data_loss=False,
        shared_mode=False,
        clock_assumption="the clock of the stream's leader is not set forward by more than a lease has left",
        waiters_visible=False,
        scope="network",
        caveat="The server writes to disk with a delay: after a power failure locks and tokens of the last minutes may "
        "be gone, unless sync_interval is 'always' (nats-server 2.10).",
        metadata_update=True,
    )

    def __init__(self, url: Url, host: Host) -> None:
        """Connect at the first call."""
        self._url = url.redacted()
        self._bucket = url.path.strip("/") or "lockkit"
        self._host = host
        self._runtime = host.runtime
        self._loop = DriverLoop(host.runtime)
        self._connection = Connection(
            url.hosts, self._bucket, self._url, ended=self._disconnected, end_calls=self._end_calls
        )
        self._silence: tuple[float, object] = (0.0, None)  # since when nothing has come, and what came last
        self._waiting: set[Request] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[asyncio.Timeout, Exception | None] = {}

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> NatsBackend:
        del options  # it has none
        if not url.hosts or not re.fullmatch(r"/?[A-Za-z0-9_-]*", url.path):
            message = f"write nats://host:4222/bucket, with a bucket of letters, digits, _ and -, not {url.redacted()}"
            raise ConfigurationError(message)
        return cls(url, host)

    @property
    def url(self) -> str:
        return self._url

    # -- one call --------------------------------------------------------------------------------------------------

    async def _call(self, coroutine: Coroutine[Any, Any, T], answer_by: float = inf) -> T:
        """Run a coroutine in the driver's loop within the time of a call, and translate its errors."""
        seconds = seconds_left(answer_by, self._runtime.now())
        return await self._loop.run(self._bounded(coroutine, seconds))

    async def _bounded(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        reason: Exception | None = None
        began, received = asyncio.get_running_loop().time(), self._connection.received
        try:
            async with asyncio.timeout(seconds) as limit:
                self._calls[limit] = None
                try:
                    return await coroutine
                finally:
                    reason = self._calls.pop(limit)
        except DRIVER_ERRORS as error:
            if isinstance(error, TimeoutError) and reason is None and self._connection.received == received:
                if self._silence[1] != received:
                    self._silence = began, received
                if asyncio.get_running_loop().time() >= self._silence[0] + SILENT_SECONDS:
                    # The server was cut off, which nats-py would notice after minutes, or its tasks were cancelled.
                    self._drop_connection()
            raise self._connection.translated(reason or error) from error

    def _drop_connection(self) -> None:
        client = self._connection.drop()
        if client is not None:
            self._start(self._close_dropped(client))

    @staticmethod
    async def _close_dropped(client: Client) -> None:
        with suppress(*DRIVER_ERRORS):
            async with asyncio.timeout(CONNECT_SECONDS):
                await client.close()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end_calls(self, reason: Exception) -> None:
        """End all calls: nats-py lets them wait for answers that do not come."""
        for limit in self._calls:
            self._calls[limit] = reason
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def _read(self, name: str) -> Record | None:
        """Read the record of a lock; None if its key was never written, or long ago."""
        _, jetstream = await self._connection.open()
        try:
            message = await jetstream.get_last_msg(f"KV_{self._bucket}", self._subject(name))
        except nats.js.errors.NotFoundError as error:
            if error.err_code != _NO_MESSAGE:  # of the stream, then
                raise
            return None
        assert message.seq is not None
        assert message.time is not None
        if message.headers and any(header in message.headers for header in _DELETED):
            return Record(message.seq, message.time, None, 0, 0.0, "")
        try:
            value = json.loads(message.data or b"")
            owner, token, ttl, metadata = value["owner"], value["token"], value["ttl"], value["metadata"]
        except (ValueError, TypeError, KeyError) as error:
            text = (
                f"{self._subject(name)} holds something that lockkit has not written: delete it, or use another bucket"
            )
            raise ConfigurationError(text, name=name, backend=self._url) from error
        return Record(message.seq, message.time, owner, token or message.seq, ttl, metadata)

    async def _write(self, name: str, content: Mapping[str, Any] | None, revision: int) -> int:
        """Write a record, or a deletion (None), if the key still has this revision; return the new one."""
        _, jetstream = await self._connection.open()
        if content is not None:
            self._connection.check_ttl(content["ttl"])
        headers = {_EXPECTED: str(revision)}
        if content is None:
            headers[_OPERATION] = "DEL"
        if self._connection.expires:
            headers["Nats-TTL"] = str(KEPT_SECONDS + ceil(0 if content is None else content["ttl"]))
        payload = b"" if content is None else json.dumps(content).encode()
        try:
            answer = await jetstream.publish(self._subject(name), payload, headers=headers)
        except nats.js.errors.APIError as error:
            if error.err_code in _WRONG_REVISION:
                raise WrongRevision from error
            raise
        return answer.seq

    async def _remaining(self, record: Record) -> float:
        """Seconds that a lease has left by the server's clock."""
        _, jetstream = await self._connection.open()
        subject = f"$KV.{self._bucket}.{CLOCK_KEY}"
        await jetstream.publish(subject)
        now = (await jetstream.get_last_msg(f"KV_{self._bucket}", subject)).time
        assert now is not None
        return record.ttl - (now - record.written).total_seconds()

    def _subject(self, name: str) -> str:
        """Keys may hold letters, digits and ``-/_=``: of all others the bytes are written ``=XX``."""
        key = re.sub(rb"[^A-Za-z0-9_/-]", lambda match: b"=%02X" % match[0][0], name.encode())
        return f"$KV.{self._bucket}.lock.{key.decode()}"

    # -- acquiring -------------------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        try:
            return await self._call(self._try_acquire(request), request.answer_by)
        except BackendUnavailable:
            attempt: Attempt | None = request.state
            if attempt is not None and attempt.expected is not None:
                raise
        # Nothing was written. The connection may have ended while nobody used it: a new one is made.
        return await self._call(self._try_acquire(request), request.answer_by)

    async def _try_acquire(self, request: Request) -> Grant | Busy:
        record = await self._read(request.name)
        if record is not None and record.owner is not None:
            remaining = await self._remaining(record)
            if remaining > 0:
                return Busy(retry_after=remaining, owner=record.owner, metadata=record.metadata)
        attempt: Attempt = request.state or Attempt()
        request.state = attempt
        attempt.expected, attempt.replaced = (record.revision, record.owner) if record else (0, None)
        connection = self._connection.number
        content = {"owner": request.owner, "token": None, "ttl": request.ttl, "metadata": request.metadata}
        try:
            revision = await self._write(request.name, content, attempt.expected)
        except WrongRevision:
            attempt.expected = None
            return Busy(retry_after=0.0)  # another client was faster
        await self._unwatch(request, attempt)
        held = Held(revision, request.metadata, connection)
        return Grant(request.name, request.owner, token=revision, ttl=request.ttl, state=held)

    async def wait(self, request: Request, busy: Busy, until: float) -> None:
        """Watch the key. The watch begins with the latest record, so a release before it began wakes, too."""
        if request not in self._waiting and until > self._runtime.now():
            await self._loop.run(self._begin_watch(request))
        await super().wait(request, busy, until)

    async def _begin_watch(self, request: Request) -> None:
        attempt: Attempt = request.state or Attempt()
        request.state, attempt.watch = attempt, []
        self._waiting.add(request)
        # In a task of its own: nats-py may leave a subscription behind if it is cancelled.
        self._start(self._watch(request, attempt, attempt.watch))

    async def _watch(self, request: Request, attempt: Attempt, watch: list[Subscription]) -> None:
        """
        Have the server send what is written to the key.

        `KeyValue.watch` of nats-py does the same, but two of its tasks go on after it was stopped. Nothing is repeated
        if a message is lost, and nothing need be: at the end of the holder's ttl the request looks again anyway.
        """

        async def written(message: Msg) -> None:
            if message.headers and any(header in message.headers for header in _DELETED):
                request.wake.set()

        try:
            client, jetstream = await self._connection.open()
            inbox = client.new_inbox()
            watch.append(await client.subscribe(inbox, cb=written))
            consumer = await jetstream.add_consumer(
                f"KV_{self._bucket}",
                deliver_subject=inbox,
                deliver_policy=DeliverPolicy.LAST_PER_SUBJECT,
                filter_subject=self._subject(request.name),
                ack_policy=AckPolicy.NONE,
                headers_only=True,
                mem_storage=True,
                inactive_threshold=WATCHER_SECONDS,
            )
            if not consumer.num_pending:
                request.wake.set()  # the key was deleted meanwhile, or the record is here already: then it is too early
        except DRIVER_ERRORS:
            if attempt.watch is watch:  # the end of the holder's ttl ends the wait, and the next one watches anew
                self._waiting.discard(request)
                attempt.watch = None
        if attempt.watch is not watch:
            await self._unsubscribe(watch)

    async def _unwatch(self, request: Request, attempt: Attempt) -> None:
        """End the watch of a request. The server forgets it soon after."""
        self._waiting.discard(request)
        watch, attempt.watch = attempt.watch, None
        await self._unsubscribe(watch or ())

    @staticmethod
    async def _unsubscribe(watch: Sequence[Subscription]) -> None:
        for subscription in watch:
            with suppress(*DRIVER_ERRORS):
                await subscription.unsubscribe()

    def _disconnected(self) -> None:
        """Wake the waiters, since their watches have ended; leases are confirmed at the next connection."""
        for request in self._waiting:
            request.state.watch = None
            request.wake.set()
        self._waiting.clear()
        self._host.confirm_soon()

    async def abandon(self, request: Request) -> None:
        if request.state is not None:
            await self._call(self._abandon(request), request.answer_by)

    async def _abandon(self, request: Request) -> None:
        """
        End the watch, and undo a write whose answer was lost.

        That write may still be on its way. It expects a revision, so it comes to nothing once the key has another one.
        """
        attempt: Attempt = request.state
        await self._unwatch(request, attempt)
        expected = attempt.expected
        while request.uncertain and expected is not None:
            record = await self._read(request.name)
            revision = record.revision if record else 0
            owner = record.owner if record else None
            if owner != request.owner and (revision != expected or owner != attempt.replaced):
                break
            try:
                await self._write(request.name, None, revision)
            except WrongRevision:
                continue
            break
        request.state = None

    # -- holding ---------------------------------------------------------------------------------------------------

    async def _replace(self, grant: Grant, content: Mapping[str, Any] | None) -> Gone | None:
        """Write in place of the grant's record; `Gone` if the record is another owner's."""
        held: Held = grant.state
        known = held.connection == self._connection.number and self._connection.is_open
        while True:
            if not known:
                record = await self._read(grant.name)
                if record is None or record.owner is None:
                    return Gone("gone")
                if record.owner != grant.owner:
                    return Gone("taken")
                held.revision, held.connection = record.revision, self._connection.number
            try:
                held.revision = await self._write(grant.name, content, held.revision)
            except WrongRevision:
                known = False  # it is of a renewal whose answer was lost, or no more there
            else:
                return None

    @staticmethod
    def _content(grant: Grant) -> dict[str, Any]:
        return {"owner": grant.owner, "token": grant.token, "ttl": grant.ttl, "metadata": grant.state.metadata}

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        return await self._call(self._renew_all(grants))

    async def _renew_all(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        outcomes = await asyncio.gather(
            *(self._replace(grant, self._content(grant)) for grant in grants), return_exceptions=True
        )
        return [
            Unknown(outcome) if isinstance(outcome, BaseException) else outcome or Renewed() for outcome in outcomes
        ]

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        return await self._call(self._replace(grant, None), answer_by) is None

    async def release_all(self, grants: Sequence[Grant], answer_by: float) -> None:
        await self._call(self._release_all(grants), answer_by)

    async def _release_all(self, grants: Sequence[Grant]) -> None:
        await asyncio.gather(*(self._replace(grant, None) for grant in grants))

    async def update(self, grant: Grant, metadata: str) -> Gone | None:
        grant.state.metadata = metadata
        return await self._call(self._replace(grant, self._content(grant)))

    # -- inspection ------------------------------------------------------------------------------------------------

    async def holders(self, name: str) -> Sequence[Holder]:
        return await self._call(self._holders(name))

    async def _holders(self, name: str) -> Sequence[Holder]:
        record = await self._read(name)
        if record is None or record.owner is None:
            return []
        remaining = await self._remaining(record)
        if remaining <= 0:
            return []
        return [Holder(record.owner, record.token, remaining, decode_metadata(record.metadata))]

    async def break_lock(self, name: str) -> bool:
        return await self._call(self._break_lock(name))

    async def _break_lock(self, name: str) -> bool:
        while True:
            record = await self._read(name)
            if record is None or record.owner is None or await self._remaining(record) <= 0:
                return False
            try:
                await self._write(name, None, record.revision)
            except WrongRevision:
                continue  # renewed, or taken by another
            return True

    async def ping(self) -> None:
        await self._call(self._ping())

    async def _ping(self) -> None:
        _, jetstream = await self._connection.open()
        await jetstream.stream_info(f"KV_{self._bucket}")

    async def erase(self) -> None:
        await self._call(self._erase())

    async def _erase(self) -> None:
        _, jetstream = await self._connection.open()
        await jetstream.delete_key_value(self._bucket)
        self._connection.forget_bucket()

    async def close(self) -> None:
        try:
            await self._call(self._close())
        finally:
            self._loop.stop()

    async def _close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)
        await self._connection.close()
