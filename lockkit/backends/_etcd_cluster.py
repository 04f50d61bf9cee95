"""
A cluster's members: which one is asked, for how long, under whose name, and when the next one is tried.

Any member answers any call, by asking the leader. One is used until it fails; then the next.

A request is sent again only if that does no harm: to another member when the first cannot have carried it out, or when
the caller says that twice is as good as once. A caller whose request must not be carried out late is told of every
attempt that ended without an answer (`Doubt`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lockkit.backends import _etcd_rpc_pb2 as rpc
from lockkit.backends._etcd_errors import (
    DRIVER_ERRORS,
    code_of,
    details_of,
    is_elsewhere,
    is_stale_token,
    is_unknown,
    translate,
)
from lockkit.backends._etcd_link import AUTHENTICATE, Call, Link, Metadata
from lockkit.errors import BackendUnavailable

if TYPE_CHECKING:
    from lockkit.runtime import Runtime

__all__ = ["CALL_SECONDS", "Cluster", "Doubt", "Login"]

log = logging.getLogger("lockkit")

CALL_SECONDS = 4.5
"""For one question, whatever the number of members asked. Longer holds up callers in an outage; shorter takes an
election, which is over within two or three seconds, for one."""

MEMBER_SECONDS = 1.5
"""For one member of several. Longer finds another one later when this one hangs; shorter leaves one that is
only slow."""

AGAIN_SECONDS = 0.03
"""Before a member is asked a second time. Longer delays a failure, shorter finds the connection still broken."""

Doubt = Callable[[], None]
"""Called when a request may or may not have been carried out, and may still be."""


class Login:
    """
    Who we are: what goes along with each call.

    Attributes:
        metadata: With the token of the last login.
    """

    def __init__(self, username: str | None, password: str | None) -> None:
        """Know a name and a password, or nothing where the cluster asks nobody."""
        self._username = username
        self._password = password or ""
        self.metadata: Metadata = None

    @property
    def pending(self) -> bool:
        """Whether a login has to come first."""
        return self._username is not None and self.metadata is None

    @property
    def possible(self) -> bool:
        """Whether a fresh token can be had."""
        return self._username is not None

    def forget(self) -> None:
        """Log in anew before the next call."""
        if self.possible:
            self.metadata = None

    async def renew(self, link: Link, timeout: float) -> None:
        """
        Log in. The token is good at every member.

        Raises:
            Exception: One of `DRIVER_ERRORS`.
        """
        request = rpc.AuthenticateRequest(name=self._username, password=self._password)
        try:
            answer = await link.call(AUTHENTICATE, request, timeout, None)
        except DRIVER_ERRORS as error:
            if "authentication is not enabled" not in details_of(error):
                raise
            self.metadata = ()
            return
        self.metadata = (("token", answer.token),)


class Lent(Login):
    """The login of a client that the application has."""

    def __init__(self, client: object) -> None:
        """Look at the client at each call: it logs in by itself."""
        super().__init__(None, None)
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
        self._links: dict[int, Link] = {}
        self._closed = False
        self._member_seconds = CALL_SECONDS if len(labels) == 1 else MEMBER_SECONDS

    async def call(
        self,
        call: Call,
        request: Any,  # noqa: ANN401 - a message
        *,
        resend: bool,
        doubt: Doubt | None = None,
        seconds: float = CALL_SECONDS,
    ) -> Any:  # noqa: ANN401 - messages
        """
        Ask, and give the answer.

        Args:
            call: What to ask.
            request: Its message.
            resend: It does no harm to send it twice.
            doubt: See `Doubt`.
            seconds: For all of it.

        Raises:
            BackendUnavailable: No usable answer.
            ConfigurationError: Wrong credentials, missing rights and the like.
            LeaseEnded: The etcd lease that it is about has ended.
        """
        until = self._runtime.now() + seconds
        # Each member once, and two times more: a connection may have been closed while it was idle, and grpc may need a
        # moment to notice.
        attempts_left = len(self._labels) + 2
        fresh_login = False
        while True:
            if attempts_left <= 2:  # noqa: PLR2004 - see above
                await self._runtime.sleep(AGAIN_SECONDS)
            link, index = self.link()
            timeout = max(0.001, min(self._member_seconds, until - self._runtime.now()))
            sent = False
            try:
                if self.login.pending:
                    await self.login.renew(link, timeout)
                    fresh_login = True
                sent = True
                return await link.call(call, request, timeout, self.login.metadata)
            except DRIVER_ERRORS as error:
                if is_stale_token(error) and self.login.possible and not fresh_login:
                    self.login.forget()
                    continue
                attempts_left -= 1
                unknown = self._passed_on(error, link, index, doubt if sent else None)
                over = not attempts_left or self._runtime.now() >= until or self._closed
                if over or (sent and unknown and not resend):
                    raise self._failed(error, link) from error
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
        with self._mutex:
            if self._closed:
                raise BackendUnavailable("the connection to etcd is closed")
            index = self._index
            link = self._links.get(index)
            if link is None:
                link = self._links[index] = self._open_link(self._labels[index])
            return link, index

    def leave(self, link: Link, error: Exception) -> None:
        """Use the next member from now on, because this one failed."""
        with self._mutex:
            index = next((index for index, one in self._links.items() if one is link), None)
        if index is not None:
            self._leave(index, error)

    def _leave(self, index: int, error: Exception) -> None:
        with self._mutex:
            if self._index == index:
                self._index = (index + 1) % len(self._labels)
        log.debug("etcd at %s: %s %s", self._labels[index], code_of(error).name, details_of(error))

    def _failed(self, error: Exception, link: Link) -> Exception:
        failure = translate(error, link.label)
        others = len(self._labels) - 1
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
