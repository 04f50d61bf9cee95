"""Which plots each workload gets, and how each of them is to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lockkit_tools.bench.settings import CONTENDERS

Unit = Literal["us", "ms", "s", "per_s", "share", "trips", "percent"]


Better = Literal["less", "more", "fair"]

HOW: Mapping[str, str] = MappingProxyType(
    {
        "box": "The thick line is the median, the box the middle half of all {things}; the whiskers reach from the "
        "fastest to the 99th percentile, on a logarithmic axis.",
        "bar": "The bar is the median of the rounds; its whisker reaches from the lowest to the highest.",
    }
)
"""How each kind of plot is to be read."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot of a workload, drawn for each backend."""

    kind: Literal["box", "bar"]  # ``box`` of the quantiles of a time; ``bar`` of one figure, its whiskers the rounds
    figure: str  # key of the figure; of a box the unit at the end of its keys
    title: str
    unit: Unit
    hint: str = ""  # what a value means, beyond `HOW`
    better: Better = "less"  # which values are: those that are ``less`` or ``more``, or near to 1 (``fair``)
    things: str = ""  # what a box is of
    line: float | None = None  # a value to mark on the axis, or None
    ratio: bool = False  # whether it shows the workload's headline figure, and with it the multiples of the baseline's

    @property
    def reads(self) -> str:
        """How to read it, where it stands alone."""
        return f"{HOW[self.kind].format(things=self.things)} {self.hint}".rstrip()


def _rate(key: str, title: str) -> Plot:
    return Plot("bar", key, title, "per_s", "More is faster.", better="more", ratio=True)


_CROWD = _rate(f"pairs_{CONTENDERS[-1]}", f"Pairs per second by {CONTENDERS[-1]} processes, all together")

_FAIRNESS = Plot(
    "bar",
    "share",
    "Fairness: least served \N{DIVISION SIGN} most served",
    "share",
    "1 is fair; near 0 a contender starved.",
    better="fair",
    line=1.0,
)

_TAKEOVER = Plot("bar", "fraction", "Takeover, in ttl", "share", "The line marks one ttl.", line=1.0)

_TRIPS = "Multiply by your round trip to get the cost."

PLOTS: Mapping[str, tuple[Plot, ...]] = MappingProxyType(
    {
        "pair": (Plot("box", "us", "Time of a pair", "us", things="pairs", ratio=True),),
        "contention": (_rate("pairs_per_second", "Pairs per second, all together"), _FAIRNESS),
        "handoff": (Plot("box", "ms", "Time of a hand-off", "ms", things="hand-offs", ratio=True),),
        "crash": (_TAKEOVER,),
        "freeze": (_TAKEOVER,),
        "distance": (
            Plot("bar", "pair_trips", "Round trips of a pair", "trips", _TRIPS, ratio=True),
            Plot("bar", "handoff_trips", "Round trips of a hand-off", "trips", "None for polling locks."),
        ),
        "sweep": (_CROWD,),
        "throughput": (_CROWD,),
        "idle": (
            Plot("bar", "commands_per_second", "Commands per second at the server", "per_s", "0 is ideal."),
            Plot("bar", "cpu_percent", "CPU of the waiting process", "percent", "0 is ideal."),
        ),
        "held": (Plot("bar", "cpu_percent", "CPU of the holding process", "percent", "Less is better."),),
        "overhead": (Plot("bar", "overhead_median_us", "API and engine, over the backend", "us", "Less is better."),),
        "read": (Plot("box", "us", "Time of a read lock", "us", things="pairs", ratio=True),),
        "write": (Plot("box", "us", "Time of a write lock", "us", things="pairs", ratio=True),),
        "readers": (
            _rate("turns_per_second", "Turns per second, all together"),
            Plot("bar", "longest_wait_ms", "Longest wait", "ms", "Less is fairer."),
        ),
        "permits": (_rate("permits_per_second", "Permits per second, all together"), _FAIRNESS),
        "locks": (
            Plot("bar", "median_us_2", "Time of two locks", "us", "Less is better.", ratio=True),
            Plot("bar", "median_us_10", "Time of ten locks", "us", "Less is better."),
        ),
        "election": (Plot("box", "ms", "Time of a takeover", "ms", things="takeovers", ratio=True),),
        "once": (Plot("box", "us", "Time of a repeat", "us", things="repeats", ratio=True),),
        "import": (Plot("bar", "over_min_ms", "Over a bare interpreter", "ms", "Less is better."),),
    }
)
"""By the name of the workload."""


def written(value: float, unit: Unit) -> str:
    """Write a value for a person: three figures that count."""
    if unit in {"us", "ms", "s"}:
        return _duration(value * {"us": 1.0, "ms": 1e3, "s": 1e6}[unit])
    number = _three(value)
    return {"per_s": f"{number}/s", "percent": f"{number} %", "share": number, "trips": number}[unit]


def _duration(microseconds: float) -> str:
    if abs(microseconds) < 1e3:
        return f"{_three(microseconds)} µs"
    if abs(microseconds) < 1e6:
        return f"{_three(microseconds / 1e3)} ms"
    return f"{_three(microseconds / 1e6)} s"


def _three(value: float) -> str:
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
