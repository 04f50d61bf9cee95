"""`BackendUnavailable.sent`: what certainly never left this machine needs no undoing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import lockkit
from lockkit_tools.servers import FaultProxy, wait_until

PATIENCE = 60.0
FORMS = [f"{kind}-{mode}" for kind in ("postgresql", "mariadb") for mode in ("table", "row", "advisory")]


@pytest.fixture(params=FORMS)
def proxy_and_url(request: pytest.FixtureRequest) -> Iterator[tuple[FaultProxy, str]]:
    """Each kind of server in each mode, behind a proxy."""
    kind, _, mode = request.param.partition("-")
    server: Any = request.getfixturevalue(kind)
    with FaultProxy(server.host, server.port) as proxy:
        yield proxy, f"{server.url.replace(server.address, proxy.address)}?mode={mode}"


def sent_of(client: lockkit.Client) -> list[bool]:
    """Try to take a lock, which must fail; give what each error of the backend says."""
    backend: Any = client._engine.client.backend
    seen: list[bool] = []
    attempt = backend.try_acquire

    async def record(request: Any) -> Any:  # noqa: ANN401 - as the backend's
        try:
            return await attempt(request)
        except lockkit.BackendUnavailable as error:
            seen.append(error.sent)
            raise

    backend.try_acquire = record
    with pytest.raises(lockkit.BackendUnavailable):
        client.lock("x").try_acquire()
    return seen


def test_refused_connection_sent_nothing(proxy_and_url: tuple[FaultProxy, str]) -> None:
    """Of a client that has no connection."""
    proxy, url = proxy_and_url
    proxy.refuse()
    with lockkit.connect(url) as client:
        assert sent_of(client) == [False]


def test_lost_answer_was_sent(proxy_and_url: tuple[FaultProxy, str]) -> None:
    """Also if the second try of the statement finds nobody to connect to."""
    proxy, url = proxy_and_url
    with lockkit.connect(url) as client:
        client.lock("x", timeout=PATIENCE).acquire().release()
        dropped = proxy.drop_next_reply()
        proxy.refuse()
        assert sent_of(client) == [True]
        assert dropped.wait(PATIENCE)
        proxy.accept()


def test_connection_that_was_not_opened_in_time_is_closed(proxy_and_url: tuple[FaultProxy, str]) -> None:
    """At once, and not when its error is collected: a server has only so many connections."""
    proxy, url = proxy_and_url
    gc.disable()
    try:
        with lockkit.connect(f"{url}&connect_timeout=2", unavailable_after=0.0) as client:
            proxy.blackhole()
            assert sent_of(client) == [False]
            connecting = [thread for thread in threading.enumerate() if thread.name == "lockkit-driver"]
            for thread in connecting:
                thread.join(PATIENCE)
            proxy.heal()
            wait_until(lambda: f"{proxy.counts.open} are open" if proxy.counts.open else None)
    finally:
        gc.enable()
