"""
Runs the conformance suite on a throw-away server of every kind, and keeps what it found for docs/comparison.

``nox -s comparison -- conformance``. Takes several minutes: several backends at a time, because most cases only wait.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import lockkit
from lockkit.bench.addresses import title
from lockkit.bench.server import watch
from lockkit.bench.table import described
from lockkit.bench.throwaway_servers import ThrowawayServers
from lockkit.testing.fork_servers import environment
from tests.comparison.runs import CONFORMANCE, dump, neutral

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["record", "summary"]

AT_A_TIME = 3


def record() -> None:
    """Verify all, and write the summaries. What could not be verified is told there."""
    started = datetime.now(UTC).date().isoformat()
    with ThrowawayServers(docker=False, several=True, tell=say) as servers, ThreadPoolExecutor(AT_A_TIME) as pool:
        reports = list(pool.map(verify, servers.urls))
        about = [server(url) for url in servers.urls]
        missing = dict(servers.missing)
    missing |= {
        title(neutral(url)): "could not be verified"
        for url, report in zip(servers.urls, reports, strict=True)
        if report is None
    }
    backends = [summary(report, said) for report, said in zip(reports, about, strict=True) if report is not None]
    found = {"date": started, "version": lockkit.__version__, "missing": missing, "backends": backends}
    CONFORMANCE.parent.mkdir(exist_ok=True)
    CONFORMANCE.write_text(neutral(dump(found)))


def say(line: str) -> None:
    """For whoever waits."""
    sys.stderr.write(f"{line}\n")


def verify(url: str) -> dict[str, Any] | None:
    """What ``lockkit verify --json`` says of a backend; None if it came to no report."""
    words = [sys.executable, "-m", "lockkit.cli", "verify", "--json"]
    # The URL may hold a password: arguments can be seen by other users.
    done = subprocess.run(words, env={**environment(), "LOCKKIT_URL": url}, stdout=subprocess.PIPE, check=False)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        say(f"{title(url)}: no report, status {done.returncode}")
        return None
    say(f"{report['backend']}: {report['passed']} passed, {report['failed']} failed")
    return report


def server(url: str) -> str:
    """Version and durability of the server."""
    with watch(url) as observer:
        return described(observer.about())


def summary(report: Mapping[str, Any], about: str) -> dict[str, Any]:
    """
    What is kept of a report: counts by group, why cases do not apply, and every failure.

    Args:
        report: Of ``lockkit verify --json``.
        about: The server.
    """
    groups: dict[str, Counter[str]] = {}
    for case in report["cases"]:
        groups.setdefault(case["group"], Counter())[case["outcome"]] += 1
    reasons = Counter(case["reason"] for case in report["cases"] if case["outcome"] in {"not promised", "skipped"})
    return {
        "backend": title(report["backend"]),
        "server": about,
        "conforms": report["conforms"],
        "groups": {group: dict(sorted(counts.items())) for group, counts in sorted(groups.items())},
        "reasons": dict(sorted(reasons.items())),
        "failed": [
            {key: case[key] for key in ("name", "face", "reason")}
            for case in report["cases"]
            if case["outcome"] == "failed"
        ],
    }


if __name__ == "__main__":
    record()
