"""What is kept of a row of measured times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

now_ns = time.monotonic_ns
"""The machine's monotonic clock: the same for all its processes, so that times of two of them may be compared."""


def spread(samples_ns: Sequence[int], unit: str) -> dict[str, float]:
    """Summarise samples: how many, minimum, quartiles, p90, p99 and maximum."""
    scale = {"us": 1e3, "ms": 1e6}[unit]
    # One sample has no quantiles; `inclusive`, because the samples are all there is, not drawn from more.
    cuts = statistics.quantiles(samples_ns, n=100, method="inclusive") if len(samples_ns) > 1 else [samples_ns[0]] * 99
    return {
        "count": len(samples_ns),
        f"min_{unit}": min(samples_ns) / scale,
        f"p25_{unit}": cuts[24] / scale,
        f"median_{unit}": cuts[49] / scale,
        f"p75_{unit}": cuts[74] / scale,
        f"p90_{unit}": cuts[89] / scale,
        f"p99_{unit}": cuts[98] / scale,
        f"max_{unit}": max(samples_ns) / scale,
    }
