"""
A cluster's members: which one is asked, for how long, under whose name, and when the next one is tried.

Any member answers any call, by asking the leader. One is used until it fails; then the next.

A request is sent again only if that does no harm: to another member when the first cannot have carried it out, or when
the caller says that twice is as good as once. A caller whose request must not be carried out late is told of every
attempt that ended without an answer (`Doubt`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd.connection import AUTHENTICATE, AsyncioLink, Call, Link, Metadata
from lockkit.backends.etcd.errors import (
    DRIVER_ERRORS,
    code_of,
    details_of,
    is_elsewhere,
    is_stale_token,
    is_unknown,
    translate,
)
from lockkit.errors import BackendUnavailable

if TYPE_CHECKING:
    from lockkit.runtime import Event, Runtime

__all__ = ["CALL_SECONDS", "Cluster", "Doubt", "Lent", "Login", "settled"]

T = TypeVar("T")

log = logging.getLogger("lockkit")

CALL_SECONDS = 4.5
"""For one question, whatever the number of members asked. Longer holds up callers in an outage; shorter takes an
election, which is over within two or three seconds, for one."""

MEMBER_SECONDS = 1.5
"""For one member of several, but not more than half of the time that is left. Longer finds another one later when this
one hangs; shorter leaves one that is only slow."""

LOGINS_MAX = 2
"""For one question. More goes on for longer where an operator changes users one after the other; fewer fails there."""

AGAIN_SECONDS = 0.03
"""Before a member is asked a second time. Longer delays a failure, shorter finds the connection still broken."""

Doubt = Callable[[], None]
"""Called when a request may or may not have been carried out, and may still be."""


class Login:
    """
    Who we are: what goes along with each call. Threads may share it.

    Attributes:
        metadata: With the token of the last login.
    """

    def __init__(self, runtime: Runtime, username: str | None, password: str | None) -> None:
        """Know a name and a password, or nothing where the cluster asks nobody."""
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._username = username
        self._password = password or ""
        self._asking: Event | None = None
        self.metadata: Metadata = None

    @property
    def possible(self) -> bool:
        """Whether a fresh token can be had."""
        return self._username is not None

    def forget(self, used: Metadata) -> None:
        """Log in anew before the next call, if that has not been done since the login that was used and failed."""
        if self.possible:
            with self._mutex:
                if self.metadata is used:
                    self.metadata = None

    async def enter(self, link: Link, until: float) -> Metadata:
        """
        Give what goes along with a call; log in if that is not known.

        One caller logs in, the others wait for that: a login costs the member a tenth of a second of its processor.

        Raises:
            BackendUnavailable: Another caller's login took too long.
            Exception: One of `DRIVER_ERRORS`.
        """
        while True:
            with self._mutex:
                if self.metadata is not None or not self.possible:
                    return self.metadata
                asking = self._asking
                mine = asking is None
                if asking is None:
                    asking = self._asking = self._runtime.event()
            left = max(0.0, until - self._runtime.now())
            if mine:
                try:
                    await self._log_in(link, left)
                finally:
                    self._asked(asking)
                    asking.set()
            elif not await asking.wait(left):
                self._asked(asking)  # should an interrupt have kept the other one from saying so
                message = f"etcd at {link.label} did not answer a login in time"
                raise BackendUnavailable(message)

    def _asked(self, asking: Event) -> None:
        with self._mutex:
            if self._asking is asking:
                self._asking = None

    async def _log_in(self, link: Link, timeout: float) -> None:
        request = rpc.AuthenticateRequest(name=self._username, password=self._password)
        try:
            answer = await link.call(AUTHENTICATE, request, timeout, None)
        except DRIVER_ERRORS as error:
            if "authentication is not enabled" not in details_of(error):
                raise
            self.metadata = ()
            return
        # The token is good at every member.
        self.metadata = (("token", answer.token),)


class Lent(Login):
    """The login of a client that the application has."""

    def __init__(self, runtime: Runtime, client: object) -> None:
        """Look at the client at each call: it logs in by itself."""
        super().__init__(runtime, None, None)
        self._client = client

    @property
    def metadata(self) -> Metadata:
        """What the client would send."""
        return getattr(self._client, "metadata", None)

    @metadata.setter
    def metadata(self, value: Metadata) -> None:
        assert value is None


class Cluster:
    """The members of one cluster, for one client. Threads may share it."""

    def __init__(self, runtime: Runtime, labels: Sequence[str], open_link: Callable[[str], Link], login: Login) -> None:
        """
        Connect to nobody yet.

        Args:
            runtime: Of the face.
            labels: Where the members are.
            open_link: Makes the link to one.
            login: Who we are.
        """
        self._runtime = runtime
        self._labels = labels
        self._open_link = open_link
        self.login = login
        self._mutex = runtime.mutex()
        # Clients that start together do not all ask the same one.
        self._index = runtime.random.randrange(len(labels))
        self._links: dict[tuple[int, bool], Link] = {}
        self._closed = False

    async def call(
        self,
        call: Call,
        request: Any,  # noqa: ANN401 - a message
        *,
        resend: bool,
        doubt: Doubt | None = None,
        answer_by: float = inf,
    ) -> Any:  # noqa: ANN401 - messages
        """
        Ask, and give the answer.

        Args:
            call: What to ask.
            request: Its message.
            resend: It does no harm to send it twice.
            doubt: See `Doubt`.
            answer_by: When the caller must have an answer, client monotonic time; at the latest after `CALL_SECONDS`.

        Raises:
            BackendUnavailable: No usable answer.
            ConfigurationError: Wrong credentials, missing rights and the like.
            LeaseEnded: The etcd lease that it is about has ended.
        """
        until = min(answer_by, self._runtime.now() + CALL_SECONDS)
        # Each member once, and two times more: a connection may have been closed while it was idle, and grpc may need a
        # moment to notice. While the interpreter exits there is nothing to wait with, and all connections are new.
        spare = 0 if self._runtime.loop_has_ended() else 2
        attempts_left = len(self._labels) + spare
        logins_left = LOGINS_MAX
        asked: set[int] = set()
        while True:
            if attempts_left <= spare:
                await self._runtime.sleep(AGAIN_SECONDS)
            link, index = self.link()
            asked.add(index)
            left = until - self._runtime.now()
            if left <= 0:
                message = f"etcd at {link.label} was not asked: no time was left"
                raise BackendUnavailable(message)
            timeout = left if len(self._labels) == 1 or attempts_left == 1 else min(MEMBER_SECONDS, left / 2)
            sent = False
            metadata: Metadata = None
            try:
                metadata = await self.login.enter(link, self._runtime.now() + timeout)
                sent = True
                return await link.call(call, request, timeout, metadata)
            except DRIVER_ERRORS as error:
                if is_stale_token(error) and self.login.possible and logins_left:
                    logins_left -= 1
                    self.login.forget(metadata)
                    continue
                attempts_left -= 1
                unknown = self._passed_on(error, link, index, doubt if sent else None)
                over = not attempts_left or self._runtime.now() >= until - AGAIN_SECONDS or self._closed
                if over or (sent and unknown and not resend):
                    raise self._failed(error, link, len(asked) - 1) from error
            except BaseException:
                # Interrupted or cancelled halfway.
                if sent and doubt is not None:
                    doubt()
                raise

    def _passed_on(self, error: Exception, link: Link, index: int, doubt: Doubt | None) -> bool:
        """
        Turn to the next member; tell whether the request may have been carried out.

        Raises:
            LockError: No other member would do better.
        """
        if not is_elsewhere(error):
            raise translate(error, link.label) from error
        self._leave(index, error)
        unknown = is_unknown(error)
        if unknown and doubt is not None:
            doubt()
        return unknown

    def link(self) -> tuple[Link, int]:
        """
        Give the member in use.

        Raises:
            BackendUnavailable: The client is closed.
        """
        outside = self._runtime.loop_has_ended()
        with self._mutex:
            if self._closed:
                raise BackendUnavailable("the connection to etcd is closed")
            index = self._index
            link = self._links.get((index, outside))
        if link is None:
            # gRPC starts threads: not under the mutex. Should another thread be faster, ours goes unused.
            made = self._open_link(self._labels[index])
            with self._mutex:
                link = self._links.setdefault((index, outside), made)
        if outside and isinstance(link, AsyncioLink):
            message = f"the event loop of the channel to etcd at {link.label} has ended"
            raise BackendUnavailable(message)
        return link, index

    def leave(self, link: Link, error: Exception) -> None:
        """Use the next member from now on, because this one failed."""
        with self._mutex:
            index = next((index for (index, _), one in self._links.items() if one is link), None)
        if index is not None:
            self._leave(index, error)

    def _leave(self, index: int, error: Exception) -> None:
        with self._mutex:
            if self._index == index:
                self._index = (index + 1) % len(self._labels)
        log.debug("etcd at %s: %s %s", self._labels[index], code_of(error).name, details_of(error))

    def _failed(self, error: Exception, link: Link, others: int) -> Exception:
        failure = translate(error, link.label)
        if others:
            failure = type(failure)(f"{failure}; nor did {others} other members of {', '.join(self._labels)} do better")
        return failure

    async def close(self) -> None:
        """Close the links that are ours."""
        with self._mutex:
            self._closed = True
            links = [*self._links.values()]
            self._links.clear()
        for link in links:
            await link.close()


async def settled(runtime: Runtime, coroutine: Coroutine[Any, Any, T], answer_by: float) -> T:
    """
    Run a coroutine to its end even though the caller is cancelled (`Runtime.settle`), but wait no longer than that.

    Raises:
        BackendUnavailable: It took longer, and goes on.
    """
    try:
        return await runtime.settle(coroutine, max(0.0, answer_by - runtime.now()))
    except TimeoutError as error:
        raise BackendUnavailable("etcd did not answer in time") from error
