"""`BackendUnavailable.sent`: what certainly never left this machine needs no undoing."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from lockkit.configuration import registry
from lockkit.runtime import drive
from lockkit.url import parse
from lockkit_tools.servers import FaultProxy, wait_until
from tests.backends.support import StubHost, granted, sent_to

PATIENCE = 60.0


@pytest.mark.parametrize("mode", ["table", "row", "advisory"])
@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_acquisition_says_whether_it_was_sent(kind: str, mode: str, request: pytest.FixtureRequest) -> None:
    """
    Refused at connect, or not opened in time: no. Its answer was lost, and there is nobody to ask again: yes.

    A connection that was not opened in time is closed at once, and not when its error is collected: a server has only
    so many.
    """
    server: Any = request.getfixturevalue(kind)
    host = StubHost()
    with FaultProxy(server.host, server.port) as proxy:
        url = parse(f"{server.url.replace(server.address, proxy.address)}?mode={mode}&connect_timeout=2")
        cold, warm = (registry.open_backend(url, {}, host)[0] for _ in range(2))
        proxy.refuse()
        assert not sent_to(cold, host.request())
        proxy.accept()
        assert drive(warm.release(granted(drive(warm.try_acquire(host.request())))))
        dropped = proxy.drop_next_reply()
        proxy.refuse()
        assert sent_to(warm, host.request())
        assert dropped.wait(PATIENCE)
        drive(warm.close())
        proxy.accept()

        gc.disable()
        try:
            threads = set(threading.enumerate())
            proxy.blackhole()
            late = host.request()
            late.answer_by = host.runtime.now() + 0.3
            assert not sent_to(cold, late)
            for thread in set(threading.enumerate()) - threads:
                thread.join(PATIENCE)
            proxy.heal()
            wait_until(lambda: f"{proxy.counts.open} are open" if proxy.counts.open else None)
        finally:
            gc.enable()
        drive(cold.close())
