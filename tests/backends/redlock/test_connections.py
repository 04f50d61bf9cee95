"""Waiters on several nodes whose subscriptions stop working without a word, and ports that speak otherwise."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import pytest
import redis

import lockkit
from lockkit.backend import Grant
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import RedisNodes, RedisServer, require
from tests.backends.redis.faces import async_only, sync_only
from tests.backends.redis.support import Face, Nat
from tests.backends.redlock.test_backend import nodes_of, open_redlock, proxied, queue_up, redlock, until
from tests.backends.support import StubHost, granted

TTL = 600.0
"""Far longer than any test: a waiter that gets the lock was told, or has noticed."""


@pytest.fixture
def nodes() -> Iterator[RedisNodes]:
    """Nodes of this test's own."""
    require("redis", local=True)
    with RedisNodes(3) as made:
        yield made


async def test_forgotten_subscriptions_are_noticed(nodes: RedisNodes, host: StubHost) -> None:
    """A NAT drops them on all nodes: the client sends a PING now and then, and the waiter retries."""
    with ExitStack() as opened:
        nats = [opened.enter_context(closing(Nat(node))) for node in nodes.nodes]
        waiting = open_redlock(f"redlock://{','.join(nat.address for nat in nats)}", host)
        try:
            async with redlock(nodes, host) as holder:
                grant = granted(await holder.try_acquire(host.request(ttl=TTL)))
                waiter = host.request(ttl=TTL)
                await queue_up(waiting, waiter)
                assert [nat.forget_subscriptions() for nat in nats] == [1, 1, 1]
                await holder.release(grant)

                assert await waiter.wake.wait(30.0)
                granted(await waiting.try_acquire(waiter))
        finally:
            await waiting.close()


@pytest.mark.parametrize("rubbish", [b"\xff\xfe", b"", b" ", b"nobody 12", b"nobody x"])
async def test_rubbish_on_the_channel_keeps_nobody_from_being_told(
    nodes: RedisNodes, host: StubHost, rubbish: bytes
) -> None:
    """Anybody may publish there: no bytes end the listening."""
    async with redlock(nodes, host) as backend:
        grant = granted(await backend.try_acquire(host.request(ttl=TTL)))
        waiter = host.request(ttl=TTL)
        await queue_up(backend, waiter)
        channels = [node.listener.channel for node in nodes_of(backend).all]
        for node, channel in zip(nodes.nodes, channels, strict=True):
            assert channel is not None
            with redis.Redis(host=node.host, port=node.port) as client:
                assert client.publish(channel, rubbish) == 1
        await backend.release(grant)

        assert await waiter.wake.wait(20.0)
        assert [node.listener.channel for node in nodes_of(backend).all] == channels


@pytest.mark.parametrize("calls_count", [1, 20], ids=["new", "steady"])
def test_threads_share_the_connections_that_are_being_opened(
    nodes: RedisNodes, caplog: pytest.LogCaptureFixture, calls_count: int
) -> None:
    """Each waits for its turn: that a connection is not open yet is no outage, so nobody is warned."""
    threads_count = 40
    ready = threading.Barrier(threads_count)
    tokens: list[int] = []

    def use(name: str) -> None:
        ready.wait()
        for _ in range(calls_count):
            with client.lock(name, timeout=PATIENCE) as lease:
                tokens.append(lease.token)

    with lockkit.connect(nodes.url) as client, caplog.at_level(logging.WARNING, logger="lockkit"):
        threads = [threading.Thread(target=use, args=(f"x{number}",)) for number in range(threads_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(tokens) == threads_count * calls_count
    assert caplog.messages == []


@sync_only
async def test_caller_with_little_time_does_not_count_as_an_outage(nodes: RedisNodes, host: StubHost) -> None:
    """A node is down when it had its own time to answer, not when a caller had less."""
    async with redlock(nodes, host, node_timeout=30.0) as backend:
        granted(await backend.try_acquire(host.request("first")))
        nodes.nodes[0].pause()
        try:
            request = host.request("second")
            request.answer_by = host.runtime.now() + 0.5
            granted(await backend.try_acquire(request))
            assert all(node.up for node in nodes_of(backend).all)
        finally:
            nodes.nodes[0].resume()
        later = granted(await backend.try_acquire(host.request("third")))
        assert len(later.state.voters) == 3


@pytest.mark.parametrize("tls", [False, True], ids=["plain port", "TLS port"])
def test_scheme_that_the_ports_do_not_speak(face: Face, *, tls: bool) -> None:
    """No outage to be waited for: the URL is wrong, and the error says how."""
    require("redis", local=True)
    with RedisServer(tls=True) as first:
        certificates = first.certificates

        def make() -> RedisServer:
            return RedisServer(tls=tls, certificates=certificates if tls else None)

        async def scenario(host: StubHost) -> None:
            hosts = ",".join(node.address for node in own.nodes)
            url = f"redlock://{hosts}" if tls else f"redlocks://{hosts}/0?{first.tls_query}"
            backend = open_redlock(url, host)
            own_nodes = nodes_of(backend).all
            try:
                # The first try may end before all ports were asked.
                with suppress(lockkit.LockError):
                    await backend.try_acquire(host.request())
                await until(host, lambda: all(isinstance(node.error, lockkit.ConfigurationError) for node in own_nodes))
                with pytest.raises(lockkit.ConfigurationError, match=f" or {'redlocks' if tls else 'redlock'}://"):
                    await backend.try_acquire(host.request())
            finally:
                await backend.close()

        with RedisNodes(3, make=make) as own:
            face.run(scenario)


@async_only
async def test_retries_without_a_pause_let_the_nodes_be_reconnected(nodes: RedisNodes, host: StubHost) -> None:
    """A task that tries again and again must let the event loop do it."""
    with proxied(nodes) as (proxies, url):
        backend = open_redlock(url, host, durable=True)
        try:
            await backend.release(granted(await backend.try_acquire(host.request())))
            for proxy in proxies:
                proxy.refuse()
                proxy.cut()
            began, outcome = host.runtime.now(), None
            while not isinstance(outcome, Grant):
                assert host.runtime.now() < began + 15.0
                if host.runtime.now() > began + 0.5:
                    for proxy in proxies:
                        proxy.accept()
                request = host.request(queue=False)
                request.answer_by = host.runtime.now() + 0.5
                with suppress(lockkit.NoQuorum):
                    outcome = await backend.try_acquire(request)
        finally:
            await backend.close()


@async_only
async def test_cut_connections_to_slow_nodes_are_replaced_in_time(nodes: RedisNodes, host: StubHost) -> None:
    """Opening one takes several answers, each of which may take as long as a node has for it."""
    with proxied(nodes) as (proxies, url):
        backend = open_redlock(url, host, durable=True, node_timeout=1.0)
        try:
            await backend.release(granted(await backend.try_acquire(host.request())))
            for proxy in proxies:
                proxy.delay(to_client=0.6)
                proxy.cut()
            await until(host, lambda: not any(node.up for node in nodes_of(backend).all))
            granted(await backend.try_acquire(host.request()))
        finally:
            await backend.close()
