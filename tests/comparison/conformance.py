"""
Keeps what a whole run of the tests found in the conformance suite, for the page of the site.

``pytest --conformance-report FILE`` writes it; CI's run does, and `nox -s conformance`, which leaves no case out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import pytest

import lockkit
from lockkit.testing.plugin import NOT_PROMISED, PROPERTY, skip_reason
from tests.comparison.runs import dump, neutral
from tests.conformance.targets import TARGETS


def record(reports: Iterable[pytest.TestReport], path: Path) -> None:
    """Write counts of each target, why cases do not apply, and every failure."""
    counts: dict[str, Counter[str]] = {entry.id: Counter() for entry in TARGETS}
    reasons: dict[str, Counter[str]] = {entry.id: Counter() for entry in TARGETS}
    failed: dict[str, list[str]] = {entry.id: [] for entry in TARGETS}
    for report in reports:
        key = dict(report.user_properties).get(PROPERTY)
        if key is None or not report.nodeid.startswith("tests/conformance/test_suite.py"):
            continue
        target, reason = str(key).rsplit("-", 1)[0], skip_reason(report)
        if report.skipped:
            counts[target]["not promised" if reason.startswith(NOT_PROMISED) else "skipped"] += 1
            reasons[target][reason.removeprefix(NOT_PROMISED)] += 1
        else:
            counts[target]["passed" if report.passed else "failed"] += 1
        if report.failed:
            failed[target].append(report.nodeid.rpartition("::")[2])
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "version": lockkit.__version__,
        "backends": [
            {
                "backend": target,
                "counts": dict(sorted(counts[target].items())),
                "reasons": dict(sorted(reasons[target].items())),
                "failed": sorted(failed[target]),
            }
            for target in counts
        ],
    }
    path.write_text(neutral(dump(found)))
