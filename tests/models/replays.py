"""What is replayed: of which models, by which traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from lockkit_tools.servers import RedisServer
from tests.models import redis_code, redlock_code, redlock_restart_code, state_code
from tests.models.check import models
from tests.models.replay import Event, Follower
from tests.models.schedules import TTL, Plan
from tests.simulation.support import apart

Trace = Callable[[int], list[Event]]


@dataclass(frozen=True)
class Replay:
    """
    The traces of one model.

    Attributes:
        bounds: Of the model: more of everything than any trace has. One tick is one second.
        kinds: More of them, for plans of two and of three clients.
    """

    model: str
    bounds: tuple[str, ...]
    kinds: tuple[tuple[str, ...], tuple[str, ...]] = (("-DCLIENTS=2",), ("-DCLIENTS=3",))

    @contextmanager
    def followers(self) -> Iterator[dict[int, Follower]]:
        """Compile the model for plans of two and of three clients."""
        (model,) = (model for model in models() if model.name == self.model)
        # Time goes on whenever a trace needs it, so that promises about time do not hold.
        flags = [*self.bounds, f"-DTTL={TTL:.0f}", *(f"-Dcheck_{name}=0" for name in model.promises)]
        with TemporaryDirectory(prefix="lockkit-replay-") as folder:
            made = {}
            for clients, kind in enumerate(self.kinds, 2):
                place = Path(folder, str(clients))
                place.mkdir()
                made[clients] = Follower(self.model, [*kind, *flags], place, tick=1.0)
            yield made

    @contextmanager
    def traces(self, **parts: object) -> Iterator[Trace]:
        """Give the function that runs the schedule of a seed; `parts` are mutants."""
        if self.model == "redis":
            with RedisServer() as server:
                yield partial(redis_code.trace, server=server, **parts)  # type: ignore[arg-type]
        else:
            yield partial(TRACES[self.model], **parts)


TRACES: dict[str, Callable[..., list[Event]]] = {
    "redlock": redlock_code.trace,
    "redlock_restart": redlock_restart_code.trace,
    "shares": state_code.Shares.trace,
    "once": state_code.OnceRuns.trace,
    "election": state_code.Elections.trace,
    "ticket": state_code.HandOvers.trace,
}
REPLAYS = {
    replay.model: replay
    for replay in (
        Replay("redis", ("-DTURNS=40", "-DRENEWALS=1", "-DLOSSES=1", "-DCRASHES=1", "-DPAUSES=1", "-DLATE=12")),
        Replay("redlock", ("-DATTEMPTS=60", "-DLOSSES=1", "-DPAUSES=1")),
        Replay(
            "shares",
            ("-DCLIENTS=3", "-DCRASHES=1", "-DPAUSES=1"),
            (("-DLIMIT=2", "-DWRITER=9"), ("-DLIMIT=9", "-DWRITER=2")),
        ),
        Replay("once", ("-DCRASHES=1", "-DPAUSES=1")),
        Replay("election", (f"-DGRACE={state_code.GRACE:.0f}", "-DLOSSES=1", "-DCRASHES=1", "-DPAUSES=1")),
        Replay("ticket", ("-DCLIENTS=4", "-DLOSSES=1", "-DPAUSES=1"), ((), ())),
        # The margins of the waits are less than a tick.
        Replay(
            "redlock_restart",
            ("-DMARKED=0", "-DRESTARTS=2", "-DLOSSES=1", "-DPAUSES=1", f"-DWAIT={TTL + 1:.0f}", "-DFORGOTTEN=61"),
        ),
    )
}


def replay(
    followers: dict[int, Follower], trace: Trace, seeds: Iterable[int]
) -> Iterator[tuple[int, Sequence[Event], int | None]]:
    """Run the schedules of seeds; give each with its events, and how many of these the model allows (`follow`)."""
    for seed in apart(seeds):
        events = trace(seed)
        yield seed, events, followers[Plan.draw(seed).clients].follow(events)
