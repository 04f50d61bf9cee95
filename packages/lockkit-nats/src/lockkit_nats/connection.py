"""The connection to the servers."""

from __future__ import annotations

import asyncio
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import nats.errors
import nats.js.errors
from nats.aio.client import Client

from lockkit.errors import BackendUnavailable, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.js.client import JetStreamContext

    from lockkit.url import HostPort

DEFAULT_PORT = 4222
CONNECT_SECONDS = 2.0
"""Longest time to connect to one server. Longer leaves too little of a call's time for the next server."""

_DENIED = "permissions violation"
NO_JETSTREAM = frozenset({10039, 10076})  # err_code of the API: not enabled for the account, not enabled at all


def _address(host: HostPort) -> str:
    name = f"[{host.host}]" if ":" in host.host else host.host
    return f"nats://{name}:{host.port or DEFAULT_PORT}"


class Connection:
    """
    One connection, made at the first use and again after it has ended. Used only in the driver's event loop.

    nats-py does not reconnect by itself here: it would keep what was sent meanwhile and send it later, and every call
    would fail late instead of at once. lockkit calls again after a pause anyway.
    """

    def __init__(
        self,
        hosts: tuple[HostPort, ...],
        bucket: str,
        shown: str,
        *,
        ended: Callable[[], None],
        end_calls: Callable[[Exception], None],
    ) -> None:
        """
        Keep the addresses.

        `ended` is called whenever a connection ends, `end_calls` when calls wait for answers that do not come.
        """
        self._hosts = hosts
        self._bucket = bucket
        self._shown = shown
        self._ended = ended
        self._end_calls = end_calls
        self._connecting = asyncio.Lock()
        self._client: Client | None = None
        self.number = 0  # of connections that were made
        self._max_age: float | None = None
        self.expires = False  # the server deletes a key of this bucket when its message says so

    async def open(self) -> tuple[Client, JetStreamContext]:
        """Return a connection; make it, and the bucket, if need be."""
        async with self._connecting:
            if self._client is not None and not self._client.is_connected:
                # Its end has not been told yet, or never is: not when `Client.close` fails half way.
                self._client = None
                self._ended()
            if self._client is None:
                self.forget_bucket()
                self._client = await self._connect()
                self.number += 1
            jetstream = self._client.jetstream()
            if self._max_age is None:
                self._max_age = await self._open_bucket(jetstream)
            return self._client, jetstream

    async def _connect(self) -> Client:
        failed: Exception | None = None
        for host in self._hosts:
            client = Client()
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await client.connect(
                        _address(host),
                        user=host.username,
                        password=host.password,
                        allow_reconnect=False,
                        # Else it goes on trying until the time is over, also if the port is closed.
                        max_reconnect_attempts=1,
                        reconnect_time_wait=0,
                        error_cb=self._reported,
                        closed_cb=partial(self._closed, client),
                    )
            except BaseException as error:
                # A call with little time gets no further than this one: let the next call begin with another.
                self._hosts = (*self._hosts[1:], host)
                await client.close()  # else its socket stays open
                if not isinstance(error, OSError | nats.errors.Error):  # a TimeoutError is an OSError
                    raise
                failed = error
            else:
                return client
        assert failed is not None, "a URL has at least one host"
        raise failed

    async def _open_bucket(self, jetstream: JetStreamContext) -> float:
        """Create the bucket if it does not exist; return at what age it deletes keys, seconds."""
        try:
            bucket = await jetstream.key_value(self._bucket)
        except nats.js.errors.BucketNotFoundError:
            bucket = await jetstream.create_key_value(bucket=self._bucket, history=1)
        status = await bucket.status()
        self.expires = bool(getattr(status.stream_info.config, "allow_msg_ttl", None))
        return status.ttl or inf

    def check_ttl(self, ttl: float) -> None:
        """
        Refuse a ttl beyond the age at which the bucket deletes keys: only one that others have made does that.

        Raises:
            ConfigurationError: Its locks would be free before their leases end.
        """
        if self._max_age is not None and ttl > self._max_age:
            message = f"{self._shown} deletes keys after {self._max_age:g} s: ttl must not be longer, got {ttl:g}"
            raise ConfigurationError(message, backend=self._shown)

    async def _reported(self, error: Exception) -> None:
        """Keep nats-py from printing errors. The calls that they break report them, except one that is not answered."""
        if _DENIED in str(error).lower():
            self._end_calls(error)

    async def _closed(self, client: Client) -> None:
        if client is self._client:  # it was up, and was not closed from here
            self.drop()

    @property
    def is_open(self) -> bool:
        """Whether the next call uses the connection that there is."""
        return self._client is not None and self._client.is_connected

    @property
    def received(self) -> tuple[Client | None, int]:
        """The connection, and how many messages it has brought."""
        return self._client, 0 if self._client is None else self._client.stats["in_msgs"]

    def drop(self) -> Client | None:
        """Give up the connection, for the caller to close: the next call makes another one."""
        client, self._client = self._client, None
        if client is not None:
            self._end_calls(nats.errors.ConnectionClosedError())
            self._ended()
        return client

    def forget_bucket(self) -> None:
        """Look for the bucket again at the next call: somebody has deleted it."""
        self._max_age = None

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def translated(self, error: Exception) -> BackendUnavailable | ConfigurationError:
        """Say in lockkit's terms what a driver's error means."""
        text = str(error) or "no answer in time"  # a TimeoutError has no text
        if "authorization" in text.lower():
            message = f"{self._shown} refuses the login ({text}): correct the user and the password in the URL"
            return ConfigurationError(message, backend=self._shown)
        if _DENIED in text.lower():
            message = f"{self._shown} refuses a request ({text}): give the user the rights that lockkit-nats needs"
            return ConfigurationError(message, backend=self._shown)
        if isinstance(error, nats.js.errors.APIError) and error.err_code in NO_JETSTREAM:
            message = (
                f"{self._shown} has no JetStream: start nats-server with --jetstream, or enable it for the account"
            )
            return ConfigurationError(message, backend=self._shown)
        if isinstance(error, nats.js.errors.NotFoundError | nats.js.errors.NoStreamResponseError):
            self.forget_bucket()
        if isinstance(error, nats.js.errors.ServiceUnavailableError):
            text = f"no JetStream there, or not yet (nats-server --jetstream enables it): {text}"
        return BackendUnavailable(f"{self._shown} does not answer: {text}", backend=self._shown)
