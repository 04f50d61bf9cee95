"""Distance: pair and hand-off over a network, in round trips."""

from __future__ import annotations

import socket
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import ClassVar

from lockkit_tools.bench.addresses import addresses, redirected, why_not_through
from lockkit_tools.bench.parts import now_ns
from lockkit_tools.bench.settings import ROUND_TRIPS_MS, Settings
from lockkit_tools.bench.subject import Subject
from lockkit_tools.bench.workloads.base import Figure, Measured, Workload, fresh_name
from lockkit_tools.bench.workloads.handoff import Handoff
from lockkit_tools.bench.workloads.pair import Pair
from lockkit_tools.servers.proxy import FaultProxy

_PAIR, _HANDOFF = Pair(), Handoff()

ECHOES = 9
"""Of which the median is taken for the round trip."""

QUEUEING_TRIPS = 12
"""A waiter needs some round trips until it waits (node, place, watch): the holder keeps the lock for so many."""

WARM_UP = 3
"""Pairs. Each takes several round trips of 20 ms; what matters is that the connections are there."""


class Distance(Workload):
    """A proxy on loopback delays everything between the clients and each server of the URL."""

    name = "distance"
    title = "Pair and hand-off over a network"
    explains = (
        "Medians with an injected round trip of 1, 5 and 20 ms, and from them the number of consecutive round trips in "
        "a pair and in a hand-off: the milliseconds that each extra millisecond of distance costs. The round trip is "
        "measured along with the subject, through the same proxy."
    )
    silent = (
        "Limited bandwidth, packet loss and jitter are not injected, nor is any delay between the nodes of a server."
    )
    figures: ClassVar[tuple[Figure, ...]] = (
        Figure("pair_trips", "round trips of a pair", digits=2),
        Figure("handoff_trips", "of a hand-off", digits=2),
        *(Figure(f"pair_{ms}_ms", f"pair ms at {ms}") for ms in ROUND_TRIPS_MS),
        *(Figure(f"handoff_{ms}_ms", f"hand-off ms at {ms}") for ms in ROUND_TRIPS_MS),
        *(Figure(f"trip_{ms}_ms", f"round trip measured at {ms}", digits=2, shown=False) for ms in ROUND_TRIPS_MS),
    )
    headline = "pair_trips"
    ratios = ("pair_trips",)
    long = True

    def inapplicable(self, subject: Subject) -> str:
        """Only where there is a network between client and lock."""
        if subject.scope != "network":
            return "there is no network between a client and its lock"
        return why_not_through(subject.url) or _PAIR.inapplicable(subject)

    def measure(self, subject: Subject, settings: Settings) -> Measured:
        hands_over = not _HANDOFF.inapplicable(subject)
        figures: dict[str, float] = {}
        with ExitStack() as stack:
            proxies = [stack.enter_context(FaultProxy(*address, precise=True)) for address in addresses(subject.url)]
            echo = stack.enter_context(_echo())
            far = replace(subject, url=redirected(subject.url, [proxy.address for proxy in proxies]))
            for trip_ms in settings.round_trips_ms:
                for proxy in (*proxies, echo):
                    proxy.delay(trip_ms / 2000, trip_ms / 2000)
                figures[f"trip_{trip_ms}_ms"] = _round_trip_ms(echo)
                part = {"name": fresh_name(), "seconds": 0.0, "pairs": settings.far_pairs, "warm_up": WARM_UP}
                figures[f"pair_{trip_ms}_ms"] = _PAIR.measure_alone(far, settings, part)["median_us"] / 1000
                if not hands_over:
                    continue
                hold = settings.hold_min + QUEUEING_TRIPS * trip_ms / 1000
                handoff = _HANDOFF.measure(far, replace(settings, handoffs=settings.far_handoffs, hold_min=hold))
                if handoff.broken:
                    return Measured(figures, broken=handoff.broken)
                figures[f"handoff_{trip_ms}_ms"] = handoff.figures["median_ms"]
        figures |= trips(figures, settings.round_trips_ms)
        if subject.poll:
            # Where in its interval the release met it decides, and not the distance.
            figures.pop("handoff_trips", None)
        return Measured(figures)


def trips(figures: Mapping[str, float], levels_ms: Sequence[int]) -> dict[str, float]:
    """
    Give the round trips of pair and hand-off.

    From the nearest to the farthest level: (time there - time here) / (round trip there - round trip here). What does
    not depend on the distance (the server's work, the proxy's, the client's) falls out of the difference.
    """
    near, far = min(levels_ms), max(levels_ms)
    apart = figures[f"trip_{far}_ms"] - figures[f"trip_{near}_ms"]
    return {
        f"{what}_trips": (figures[f"{what}_{far}_ms"] - figures[f"{what}_{near}_ms"]) / apart
        for what in ("pair", "handoff")
        if f"{what}_{far}_ms" in figures and apart > 0
    }


@contextmanager
def _echo() -> Iterator[FaultProxy]:
    """Give a proxy with a server behind it that sends back what it gets, one connection at a time."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # the listener was closed: that is the end
            with connection:
                while data := connection.recv(64):
                    connection.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with closing(listener), FaultProxy(*listener.getsockname(), precise=True) as proxy:
        yield proxy
        # Linux: closing a socket does not wake a thread that accepts on it; shutting it down does.
        listener.shutdown(socket.SHUT_RDWR)


def _round_trip_ms(echo: FaultProxy) -> float:
    times = []
    with socket.create_connection((echo.host, echo.port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ECHOES):
            began = now_ns()
            connection.sendall(b".")
            connection.recv(1)
            times.append((now_ns() - began) / 1e6)
    return statistics.median(times)
