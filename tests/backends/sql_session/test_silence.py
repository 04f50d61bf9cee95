"""mode=row and mode=advisory where a NAT forgets connections, or a load balancer closes those that are silent."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

import lockkit.aio
from lockkit_tools.servers import FaultProxy, wait_until
from tests.backends.sql_session.support import LONG, PATIENCE, ModeServer, queued, until_waiting
from tests.backends.support import Connect
from tests.tries import beside, until_async

KEEPALIVE = 1.0
IDLE = 3.0
"""After how long the balancer closes a silent connection, seconds: between KEEPALIVE and a third of LONG."""


@pytest.fixture
def proxy(place: ModeServer) -> Iterator[FaultProxy]:
    """What is between client and server."""
    with FaultProxy(place.server.host, place.server.port) as proxy:
        yield proxy


def through(proxy: FaultProxy, place: ModeServer) -> str:
    """The URL of a client behind the proxy."""
    url = place.url.replace(place.server.address, proxy.address)
    return f"{url}&keepalive={KEEPALIVE:g}"


def test_waiter_gets_the_lock(place: ModeServer, proxy: FaultProxy, connect: Connect) -> None:
    """Also without a timeout; the server had granted it to the connection that nobody reads."""
    holder, waiter = connect(place.url), connect(through(proxy, place))
    lease = holder.lock("x", ttl=LONG).acquire(PATIENCE)
    got = beside(waiter.lock("x", ttl=LONG).acquire)
    until_waiting(waiter, "x")
    assert proxy.forget() > 0
    lease.release()
    assert got.result(PATIENCE).confirm()
    got.result().release()


def test_waiter_that_is_only_slow_keeps_its_place(place: ModeServer, proxy: FaultProxy, connect: Connect) -> None:
    """The server says that it still waits, so nobody that comes later overtakes it."""
    holder, waiter = connect(place.url), connect(through(proxy, place))
    lease = holder.lock("x", ttl=LONG).acquire(PATIENCE)
    got = queued(waiter, "x")
    (request,) = waiter._engine.acquisitions.waiting
    session, asked_at = request.state.session, request.state.look_at
    wait_until(lambda: None if request.state.look_at > asked_at else "has not asked")
    assert request.state.session is session
    lease.release()
    got.result(PATIENCE).release()


class TestIdleCuts:
    """A load balancer that closes silent connections."""

    @pytest.mark.parametrize("renew", [True, False])
    def test_lock_with_a_long_ttl_is_kept(
        self, place: ModeServer, proxy: FaultProxy, connect: Connect, *, renew: bool
    ) -> None:
        """Its renewals would come too late; the other client's connection shows that silence is not let pass."""
        client = connect(through(proxy, place))
        with (
            socket.create_connection((proxy.host, proxy.port)) as silent,
            client.lock("x", ttl=LONG, renew=renew) as lease,
        ):
            silent.settimeout(PATIENCE)
            proxy.cut_idle(IDLE)
            while silent.recv(4096):  # until the other end closes it
                pass
            assert lease.confirm()
            assert not lease.lost

    def test_waiter_that_was_cut_waits_anew(self, place: ModeServer, proxy: FaultProxy, connect: Connect) -> None:
        """Nothing can be sent while a statement waits: it loses its place, and gets the lock."""
        holder, waiter = connect(place.url), connect(through(proxy, place))
        lease = holder.lock("x", ttl=LONG).acquire(PATIENCE)
        got = queued(waiter, "x")
        before = proxy.counts.connections
        proxy.cut_idle(IDLE)
        wait_until(lambda: None if proxy.counts.connections > before else "was not cut")
        proxy.heal()
        lease.release()
        got.result(PATIENCE).release()

    def test_sign_of_life_does_not_extend_a_lease_that_is_not_renewed(
        self, place: ModeServer, proxy: FaultProxy, connect: Connect
    ) -> None:
        """When its client is cut off, the server still frees it when its ttl is over."""
        ttl = 6.0
        client, other = connect(through(proxy, place)), connect(place.url)
        lease = client.lock("x", ttl=ttl, renew=False).acquire(PATIENCE)
        session = lease._record.grant.state.session
        sent_at = session.sent_at
        wait_until(lambda: None if session.sent_at > sent_at else "no sign of life")
        left = lease.remaining()
        proxy.forget()
        with other.lock("x", ttl=LONG, timeout=PATIENCE):
            assert left > 0
            assert lease.lost


def test_lease_that_was_extended_beyond_the_keepalive_sends_it(place: ModeServer, connect: Connect) -> None:
    """Its ttl had been short enough to do without."""
    client = connect(f"{place.url}&keepalive=4")
    with client.lock("x", ttl=4, renew=False, timeout=PATIENCE) as lease:
        lease.extend(LONG)
        session = lease._record.grant.state.session
        sent_at = session.sent_at
        wait_until(lambda: None if session.sent_at > sent_at else "no sign of life", timeout=20)


def test_keepalives_go_on_when_all_tasks_are_cancelled(place: ModeServer) -> None:
    """By an application that goes on."""

    async def cancel() -> None:
        async with (
            lockkit.aio.connect(f"{place.url}&keepalive={KEEPALIVE:g}") as client,
            client.lock("x", ttl=LONG, renew=False, timeout=PATIENCE) as lease,
        ):
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            session = lease._record.grant.state.session
            sent_at = session.sent_at
            await until_async(lambda: session.sent_at > sent_at)

    asyncio.run(cancel())


def test_socket_is_kept_alive(place: ModeServer, connect: Connect) -> None:
    """The system notices within half a minute that the way is lost, whatever the driver asked for."""
    client = connect(place.url)
    with client.lock("x", ttl=LONG) as lease:
        fd = lease._record.grant.state.session.connection.fd
        with socket.socket(fileno=os.dup(fd)) as copy:
            assert copy.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
            idle, interval, count = (copy.getsockopt(socket.IPPROTO_TCP, option) for option in options)
            assert idle + interval * count <= 30
            assert 0 < copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
