"""From values to positions on an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_TICKS_MAX = 5
"""More would touch one another on a phone."""


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis."""

    low: float  # value at its left end
    high: float  # value at its right end, above `low`
    logarithmic: bool = False  # equal ratios are equal lengths

    @classmethod
    def linear(cls, values: Sequence[float]) -> Self:
        """From zero, without which the length of a bar means nothing, to a round number above all."""
        highest = max(values, default=0.0)
        if highest <= 0:
            return cls(0.0, 1.0)
        step = 10 ** math.floor(math.log10(highest))
        high = next(step * factor for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * factor >= highest)
        return cls(0.0, high)

    @classmethod
    def log(cls, values: Sequence[float]) -> Self:
        """From below all to above all, in steps of 1, 2 and 5."""
        positive = [value for value in values if value > 0] or [1.0]
        low, high = _step_down(min(positive)), _step_up(max(positive))
        return cls(low, high if high > low else low * 10, logarithmic=True)

    def at(self, value: float) -> float:
        """Give the position of a value: 0 to 100, also for values beyond the ends."""
        if self.logarithmic:
            if value <= 0:
                return 0.0
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return 100 * min(1.0, max(0.0, share))

    def ticks(self) -> list[float]:
        """Give the values to write at the axis, few of them."""
        if not self.logarithmic:
            return [self.low, (self.low + self.high) / 2, self.high]
        decades = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
        marks = [10.0**decade for decade in decades]
        if len(marks) < 2:
            return [self.low, self.high]
        return marks[:: math.ceil(len(marks) / _TICKS_MAX)]


def _step_down(value: float) -> float:
    decade = 10.0 ** math.floor(math.log10(value))
    return next(decade * factor for factor in (5, 2, 1) if decade * factor <= value * (1 + 1e-9))


def _step_up(value: float) -> float:
    decade = 10.0 ** math.floor(math.log10(value))
    return next(decade * factor for factor in (1, 2, 5, 10) if decade * factor >= value * (1 - 1e-9))
