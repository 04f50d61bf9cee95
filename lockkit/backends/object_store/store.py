"""
The bucket: one request at a time through obstore, within the time of a call, and its errors as lockkit's.

obstore is asyncio on top of threads of its own (Rust's tokio). `lockkit.drivers.DriverLoop` runs it for both APIs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import obstore
import obstore.store
from obstore import exceptions

from lockkit import validation
from lockkit.backend import CALL_SECONDS, Option
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.url import Url

CONNECT_SECONDS = 2.5
"""Longest time to connect. Longer leaves a call that has to connect anew no time for its request."""

PREFIX_CHARS_MAX = 200
"""An object's name has at most 1,024 bytes, and a lock's up to 800 of them."""

Version = Mapping[str, str]
"""What a conditional write expects: the ``e_tag`` of the object, its ``version``, or both."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_FOLDER = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._=-]+")
_ENDPOINT = re.compile(r"https?://[^/?#@\s]+(/[^?#@\s]*)?")

DRIVER_ERRORS = (exceptions.BaseError, OSError, ValueError)
_REFUSED = (
    exceptions.InvalidPathError,
    exceptions.NotSupportedError,
    exceptions.PermissionDeniedError,
    exceptions.UnauthenticatedError,
    exceptions.UnknownConfigurationKeyError,
    ValueError,
)
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
        message = "it must be http://host:port or https://host, without a user"
        raise ValueError(message)
    return text


OPTIONS: Mapping[str, Option] = {
    "endpoint": Option(_parse_endpoint, "Address of the service, http(s)://host[:port], if it is not the platform's."),
    "region": Option(
        validation.parse_text, "Region of the bucket (s3: only); else the environment's or the profile's."
    ),
    "account": Option(validation.parse_text, "Storage account (az: only); else AZURE_STORAGE_ACCOUNT_NAME."),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the objects are: a bucket (or container), and its settings as the store's class takes them."""

    scheme: str
    bucket: str
    settings: Mapping[str, Any]
    shown: str  # for messages

    def connect(self) -> Any:  # noqa: ANN401 - of one of obstore's classes
        """Make the store. Reads what credentials there are, which may ask another server."""
        if self.scheme != "s3":
            kind: Any = obstore.store.GCSStore if self.scheme == "gs" else obstore.store.AzureStore
            return kind(self.bucket, **self.settings)
        return obstore.store.S3Store(self.bucket, **self.settings, credential_provider=_boto3_credentials())


def place_of(url: Url, options: Mapping[str, Any]) -> Place:
    """Read a URL. No I/O."""
    shown, bucket, prefix, endpoint = url.safe_text, url.host or "", url.path.strip("/"), options["endpoint"]
    given = {"region": "s3", "account": "az"}
    foreign = [name for name, scheme in given.items() if options[name] is not None and url.base != scheme]
    problem = ""
    if url.username is not None:
        problem = "credentials come from the platform's usual chain (environment, profile, role), not from the URL"
    elif len(url.hosts) != 1 or url.port is not None or not _BUCKET.fullmatch(bucket):
        problem = f"write {url.scheme}://{'container' if url.base == 'az' else 'bucket'}/prefix"
    elif prefix and (len(prefix) > PREFIX_CHARS_MAX or not all(map(_FOLDER.fullmatch, prefix.split("/")))):
        problem = f"the prefix has up to {PREFIX_CHARS_MAX} letters, digits, and . _ = - /"
    elif foreign:
        problem = f"the option {foreign[0]} is for {given[foreign[0]]}:// only"
    if problem:
        raise ConfigurationError(f"{shown} is not understood: {problem}", backend=shown)
    names = {"base_url" if url.base == "gs" else "endpoint": endpoint, "region": options["region"]}
    config = {**names, "account_name": options["account"]}
    seconds = {"timeout": CALL_SECONDS, "connect_timeout": CONNECT_SECONDS}
    settings = {
        "prefix": prefix or None,
        "config": {name: value for name, value in config.items() if value is not None},
        "client_options": {
            **{name: timedelta(seconds=value) for name, value in seconds.items()},
            **({"allow_http": True} if (endpoint or "").startswith("http:") else {}),
        },
        # The engine retries: it knows how long a lock may take, and a repeated write would fail on its own first one.
        "retry_config": {"max_retries": 0},
    }
    return Place(url.base, bucket, settings, f"{shown} ({endpoint})" if endpoint else shown)


def _boto3_credentials() -> Any:  # noqa: ANN401 - obstore's
    """Have boto3 find credentials, if it is installed: it knows profiles and single sign-on, which obstore does not."""
    if {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"} & os.environ.keys() or find_spec("boto3") is None:
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415 - imports boto3

    try:
        return Boto3CredentialProvider()
    except ValueError:  # it has found none: obstore looks in places of its own
        return None


_used_by: set[int] = set()  # the process that has used obstore, and in a forked child the parent's


class Store:
    """The objects below one prefix. All methods run in one event loop, and raise `LockError` alone."""

    def __init__(self, place: Place) -> None:
        """Connect at the first call."""
        self.place = place
        self._store: Any = None

    def check_process(self) -> None:
        """
        Refuse a process that was forked after its parent had used obstore.

        The threads that wait for answers are the parent's: each call would hang.
        """
        if _used_by and os.getpid() not in _used_by:
            message = (
                f"{self.place.shown} cannot be used in this process, which was forked after its parent had used an "
                "object store: start it with multiprocessing's 'spawn', or fork before the first use"
            )
            raise ConfigurationError(message, backend=self.place.shown)

    def _opened(self) -> Any:  # noqa: ANN401 - as above
        if self._store is None:
            self._store = self.place.connect()
        _used_by.add(os.getpid())
        return self._store

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except LockError:
            raise
        except DRIVER_ERRORS as error:
            raise self.translate(error) from error

    async def read(self, name: str) -> tuple[bytes, Version] | None:
        """Return the content of an object, and its version; None if there is none."""
        with self._translated():
            try:
                found = await obstore.get_async(self._opened(), name)
                return bytes(await found.bytes_async()), self._version(found.meta)
            except FileNotFoundError as error:
                if _NO_BUCKET.search(str(error)):
                    raise
                return None

    async def write(self, name: str, content: bytes, expected: Version | None) -> Version | None:
        """
        Write an object if it still has the version, or with None if there is none.

        Returns:
            The new version; None if it was not written, because another writer was faster.
        """
        mode: Any = "create" if expected is None else dict(expected)
        with self._translated():
            try:
                stored = await obstore.put_async(self._opened(), name, content, mode=mode, use_multipart=False)
                return self._version(stored)
            except (exceptions.PreconditionError, exceptions.AlreadyExistsError):
                return None
            except FileNotFoundError as error:
                if expected is None or _NO_BUCKET.search(str(error)):
                    raise
                return None  # somebody has deleted it

    async def list(self, folder: str, after: str, count: int) -> Sequence[str]:
        """Return names of objects in a folder and below, in their order: those after a name, or all if it is empty."""
        with self._translated():
            async for chunk in obstore.list(self._opened(), folder or None, offset=after or None, chunk_size=count):
                return [found["path"] for found in chunk]
        return []

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects."""
        with self._translated(), suppress(FileNotFoundError):
            await obstore.delete_async(self._opened(), [*names])

    def _version(self, stored: Mapping[str, Any]) -> Version:
        version = {key: stored[key] for key in ("e_tag", "version") if stored.get(key) is not None}
        if not version:
            message = f"{self.place.shown} gives its objects no versions (ETags), without which no lock is exclusive"
            raise ConfigurationError(message, backend=self.place.shown)
        return version

    def translate(self, error: Exception) -> LockError:
        """Turn an error of obstore into lockkit's; raise it ``from`` the original."""
        text, shown = str(error), self.place.shown
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
