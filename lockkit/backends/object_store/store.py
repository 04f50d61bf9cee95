"""
The bucket: requests through obstore, within the time of a call, and its errors as lockkit's.

obstore is asyncio on top of threads of its own (Rust's tokio). `lockkit.drivers.DriverLoop` runs it for both APIs.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from datetime import timedelta
from importlib.util import find_spec
from math import inf
from typing import Any, TypeVar

import obstore
import obstore.store
from obstore import exceptions

from lockkit import validation
from lockkit.backend import CALL_SECONDS, Option, seconds_left
from lockkit.backends.object_store.record import Version
from lockkit.drivers import DriverLoop, in_thread
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import AsyncioRuntime, Runtime
from lockkit.units import Instant, Seconds
from lockkit.url import Url

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 32
"""How many requests of one call are under way. More opens more connections; fewer renews many leases later."""

CONNECT_SECONDS = 2.5
"""Longest time to connect. Longer leaves a call that has to connect anew no time for its request."""

OPENING_SECONDS = 60.0
"""How long the calls of a client share one search for credentials. Longer keeps them from one that would succeed;
shorter leaves more threads where each search hangs."""

PREFIX_CHARS_MAX = 200
"""An object's name has at most 1,024 bytes, and a lock's up to 800 of them."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_FOLDER = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._=-]+")
_ENDPOINT = re.compile(r"https?://[^/?#@\s]+(/[^?#@\s]*)?")

DRIVER_ERRORS = (exceptions.BaseError, OSError, ValueError)
_REFUSED = (exceptions.NotSupportedError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, ValueError)
_RIGHTS = (
    "The credentials come from the platform's usual chain (environment, profile, role), and need the rights to read, "
    "write and list the objects: without the last, S3 answers so where there is no object"
)
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
# Redirects: a wrong region or endpoint. 501: the store knows no conditions. 400 may also be a stalled upload.
_FOR_GOOD = re.compile(r"status code: (30[1278]|400|401|403|405|501)\b(?!.*<Code>RequestTimeout)|builder error")
_NOT_SENT = re.compile(r"kind: Connect,|dns error")
_SAID = re.compile(r"<Code>([^<]*)</Code>\s*(?:<Message>([^<]*)</Message>)?")


def _parse_endpoint(value: object) -> str:
    text = validation.parse_text(value).rstrip("/")
    if not _ENDPOINT.fullmatch(text):
        raise ValueError("it must be http://host:port or https://host, without a user")
    return text


OPTIONS: Mapping[str, Option] = {
    "endpoint": Option(_parse_endpoint, "Address of the service, http(s)://host[:port], if it is not the platform's."),
    "region": Option(validation.parse_text, "Region of the bucket (s3: only); else that of environment or profile."),
    "account": Option(validation.parse_text, "Storage account (az: only); else AZURE_STORAGE_ACCOUNT_NAME."),
}

_used_by: set[int] = set()  # the process that has used obstore, and in a forked child the parent's


class Store:
    """Objects below one prefix. What uses them is run by `run` or `run_each`, which raise `LockError` alone."""

    def __init__(self, url: Url, options: Mapping[str, Any], runtime: Runtime) -> None:
        """Read a URL. No I/O."""
        prefix, endpoint = url.path.strip("/"), options["endpoint"]
        self.shown = url.safe_text + (f" ({endpoint})" if endpoint else "")
        self.scheme, self._runtime = url.base, runtime
        self.loop = DriverLoop(runtime, lambda: repr(self._store))
        self._store: Any = None
        self._opening: asyncio.Task[Any] | None = None
        problem = ""
        for name, scheme in (("region", "s3"), ("account", "az")):
            if options[name] is not None and url.base != scheme:
                problem = f"the option {name} is for {scheme}:// only"
        if url.username is not None:
            problem = "credentials come from the platform's usual chain (environment, profile, role), not from the URL"
        elif len(url.hosts) != 1 or url.port is not None or not _BUCKET.fullmatch(url.host or ""):
            problem = f"write {url.scheme}://{'container' if url.base == 'az' else 'bucket'}/prefix"
        elif prefix and (len(prefix) > PREFIX_CHARS_MAX or not all(map(_FOLDER.fullmatch, prefix.split("/")))):
            problem = f"the prefix has up to {PREFIX_CHARS_MAX} letters, digits, and . _ = - /"
        if problem:
            raise ConfigurationError(f"{self.shown} is not understood: {problem}", backend=self.shown)
        address = "base_url" if url.base == "gs" else "endpoint"
        config = {address: endpoint, "region": options["region"], "account_name": options["account"]}
        self._settings: Mapping[str, Any] = {
            "url": f"{url.base}://{url.host}/{prefix}",
            "config": {name: value for name, value in config.items() if value is not None},
            "client_options": {
                "timeout": timedelta(seconds=CALL_SECONDS),
                "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                "allow_http": (endpoint or "").startswith("http:"),
            },
            # The engine retries: it knows how much time is left, and a repeated write would fail on its own first one.
            "retry_config": {"max_retries": 0},
        }

    async def run(self, coroutine: Coroutine[Any, Any, T], answer_by: Instant = inf) -> T:
        """Run a coroutine in the loop of obstore, within the time of a call."""
        return await self.loop.run(self._bounded(coroutine, seconds_left(answer_by, self._runtime.now())))

    async def run_each(
        self, work: Callable[[T], Coroutine[Any, Any, R]], items: Sequence[T], answer_by: Instant = inf
    ) -> list[R | BaseException]:
        """Do the same for several, so many at once. What gets no answer in time does not take it from the others."""
        turn, now = asyncio.Semaphore(AT_ONCE), self._runtime.now()
        until = now + seconds_left(answer_by, now)

        async def take_turn(item: T) -> R:
            async with turn:
                return await self._bounded(work(item), until - self._runtime.now())

        async def all_of_them() -> list[R | BaseException]:
            return await asyncio.gather(*map(take_turn, items), return_exceptions=True)

        return await self.loop.run(all_of_them())

    async def _bounded(self, coroutine: Coroutine[Any, Any, T], seconds: Seconds) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await coroutine
        except LockError:
            raise
        except DRIVER_ERRORS as error:
            raise self.translate(error) from error

    async def read(self, name: str) -> tuple[bytes, Version] | None:
        """Return the content of an object, and its version; None if there is none."""
        try:
            found = await obstore.get_async(await self._opened(), name)
            return bytes(await found.bytes_async()), self._version(found.meta)
        except FileNotFoundError as error:
            if _NO_BUCKET.search(str(error)):
                raise
            return None

    async def write(self, name: str, content: bytes, expected: Version | None) -> Version | None:
        """Write if the object has the version, or None if there is none; return the new one, None if it has not."""
        mode: Any = "create" if expected is None else dict(expected)
        try:
            stored = await obstore.put_async(await self._opened(), name, content, mode=mode, use_multipart=False)
            return self._version(stored)
        except (exceptions.PreconditionError, exceptions.AlreadyExistsError):
            return None
        except FileNotFoundError as error:
            if expected is None or _NO_BUCKET.search(str(error)):
                raise
            return None  # somebody has deleted it

    async def list(self, folder: str, after: str, count: int) -> Sequence[str]:
        """Return names of objects in a folder and below, in their order: those after a name, or all if it is empty."""
        async for chunk in obstore.list(await self._opened(), folder or None, offset=after or None, chunk_size=count):
            return [found["path"] for found in chunk]
        return []

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        with suppress(FileNotFoundError):
            await obstore.delete_async(await self._opened(), [*names])

    async def _opened(self) -> Any:  # noqa: ANN401 - of one of obstore's classes
        """Return obstore's store. The threads that wait for answers do not survive a fork: each call would hang."""
        if _used_by - {os.getpid()}:
            message = (
                f"{self.shown} cannot be used in this process, which was forked after its parent had used an object "
                "store: start it with multiprocessing's 'spawn', or fork before the first use"
            )
            raise ConfigurationError(message, backend=self.shown)
        if self._store is not None:
            return self._store
        opening = self._opening
        if opening is None:
            # In a thread, and one for all calls: boto3 may run a program that asks a person. Not in the context of this
            # call, for whose end `DriverLoop.stop` waits.
            search = in_thread(AsyncioRuntime(), self.connect, OPENING_SECONDS)
            opening = self._opening = asyncio.create_task(search, context=Context())
            opening.add_done_callback(self._has_opened)
        await asyncio.wait([opening])
        return opening.result()

    def _has_opened(self, task: asyncio.Task[Any]) -> None:
        self._opening = None
        if not task.cancelled() and task.exception() is None:
            self._store = task.result()
            _used_by.add(os.getpid())

    def connect(self) -> Any:  # noqa: ANN401 - as above
        """Make obstore's store. Reads what credentials there are, which may ask another server."""
        try:
            found = {"credential_provider": _boto3_credentials()} if self.scheme == "s3" else {}
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            message = f"{self.shown}: boto3 finds no credentials ({reason}). Correct AWS_PROFILE, or what it leads to"
            raise ConfigurationError(message, backend=self.shown) from error
        return obstore.store.from_url(**self._settings, **found)

    def _version(self, stored: Mapping[str, Any]) -> Version:
        version = {key: stored[key] for key in ("e_tag", "version") if stored.get(key) is not None}
        if not version:
            message = f"{self.shown} gives its objects no versions (ETags), without which no lock is exclusive"
            raise ConfigurationError(message, backend=self.shown)
        return version

    def translate(self, error: Exception) -> LockError:
        """Turn an error of obstore into lockkit's; raise it ``from`` the original."""
        text, shown = str(error), self.shown
        said = _SAID.search(text)
        # The rest of the text is the structure of the error, over many lines.
        reason = ": ".join(filter(None, said.groups())) if said else text.partition("\n")[0] or "no answer in time"
        if isinstance(error, FileNotFoundError) or _NO_BUCKET.search(text):
            message = f"{shown}: there is no such bucket or container ({reason}). Create it, or correct the URL"
            return ConfigurationError(message, backend=shown)
        if isinstance(error, _REFUSED) or _FOR_GOOD.search(text.replace("\n", " ")):
            return ConfigurationError(f"{shown} refuses the request: {reason}. {_RIGHTS}", backend=shown)
        sent = not _NOT_SENT.search(text)
        what = "gives no usable answer" if sent else "cannot be reached: is it running, and reachable from here?"
        failure = BackendUnavailable(f"{shown} {what} ({reason})", backend=shown)
        failure.sent = sent
        return failure


def _boto3_credentials() -> Any:  # noqa: ANN401 - obstore's
    """Have boto3 find credentials, if it is installed: it knows profiles and single sign-on, which obstore does not."""
    if not {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"} & os.environ.keys() and find_spec("boto3") is not None:
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415 - imports boto3

        try:
            return Boto3CredentialProvider()
        except ValueError as error:
            if type(error) is not ValueError:  # of JSON, or a name that is no text
                raise
    return None  # it has found none: obstore looks in places of its own
