"""Metrics of locks, with the real library."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

import lockkit
from lockkit import observers
from lockkit.backend import LossReason
from lockkit.errors import BackendUnavailable
from lockkit.integrations.prometheus import PrometheusObserver
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import MovableClock, fail, once, pass_time, scripted
from tests.programs import run_python
from tests.tries import begin_to_wait, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    """A registry, filled by an observer of all locks."""
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    lockkit.add_observer(observer)
    yield registry
    lockkit.remove_observer(observer)


@pytest.fixture
def client() -> Iterator[lockkit.Client]:
    """A client of a space of its own."""
    with lockkit.connect("memory://prometheus", ttl=PATIENCE) as client:
        yield client


def seen() -> None:
    """Wait until the observers have seen everything: a loss is nobody's call, so no call waits for it."""
    for channel in observers.active or ():
        channel.flush(PATIENCE)


def value(registry: CollectorRegistry, metric: str, template: str, mode: str = "exclusive", **labels: str) -> float:
    """Read one metric; 0.0 if nothing was counted."""
    labels = {"template": template, "backend": "memory://prometheus", "mode": mode, **labels}
    return registry.get_sample_value(f"lockkit_{metric}", labels) or 0.0


def test_acquisitions_waits_and_holds(
    registry: CollectorRegistry, client: lockkit.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by template, backend, mode and outcome."""
    begin_to_wait(monkeypatch)

    @client.lock("seat:{seat}")
    def book(seat: str) -> float:
        client.lock(f"seat:{seat}", label="seat:{seat}").try_acquire(0.02)
        return value(registry, "held", "seat:{seat}")

    assert (book("12A"), book("12B")) == (1.0, 1.0)

    def count(metric: str, **labels: str) -> float:
        return value(registry, metric, "seat:{seat}", **labels)

    assert count("acquisitions_total", outcome="granted") == 2
    assert count("acquisitions_total", outcome="busy") == 2
    assert count("waits_total") == 2
    assert count("wait_seconds_count") == 4
    assert count("wait_seconds_sum") >= 0.04
    assert count("held") == 0
    assert count("hold_seconds_count") == 2
    assert count("hold_seconds_sum") >= 0.04


def test_no_label_is_ever_a_name(registry: CollectorRegistry, client: lockkit.Client) -> None:
    """Names may be without number, and each value of a label is a series."""
    with client.lock("seat:12A"), client.rwlock("seat:12B").read(), client.semaphore("seat:12C", 2):
        client.lock("seat:12A").try_acquire()

    assert b"seat" not in generate_latest(registry)
    assert value(registry, "hold_seconds_count", "unlabelled") == 1
    assert value(registry, "hold_seconds_count", "unlabelled", "shared") == 1
    assert value(registry, "hold_seconds_count", "unlabelled", "permit") == 1


def test_losses_are_counted_from_zero(registry: CollectorRegistry, client: lockkit.Client) -> None:
    """An alert on an increase does not see a series that begins with 1."""
    client.lock("a", label="a").acquire().release()
    seen()
    labels = {"template": "a", "backend": "memory://prometheus", "mode": "exclusive"}
    for reason in get_args(LossReason):
        assert registry.get_sample_value("lockkit_losses_total", {**labels, "reason": reason}) == 0.0


def test_calls_that_wait_and_the_oldest_lease(registry: CollectorRegistry, client: lockkit.Client) -> None:
    """Both go back when the wait and the lease are over."""
    assert value(registry, "waiting", "a") == 0.0
    before = time.time()
    holder = client.lock("a", label="a").acquire()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.lock("a", label="a").try_acquire, PATIENCE)
        until(lambda: value(registry, "waiting", "a") == 1.0)
        assert before <= value(registry, "oldest_held_timestamp_seconds", "a") <= time.time()
        holder.release()
        lease = call.result()
        assert lease is not None
        lease.release()
        seen()
        assert value(registry, "waiting", "a") == 0.0


def test_late_renewal_is_shown() -> None:
    """As its observers see it."""
    registry = CollectorRegistry()
    observer = PrometheusObserver(registry)
    lockkit.add_observer(observer)
    client, _ = scripted(MovableClock(), space="prometheus-late")
    try:
        with client.lock("a", label="a", ttl=60):
            pass_time(client, 25.0)  # it was due after 20
            labels = {"template": "a", "backend": client.url, "mode": "exclusive"}
            until(lambda: (registry.get_sample_value("lockkit_renewal_late_seconds", labels) or 0.0) >= 5.0)
    finally:
        lockkit.remove_observer(observer)
        client.close()


def exported(registry: CollectorRegistry) -> dict[str, set[str]]:
    """The series of each metric."""
    ends = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}
    return {metric.name: {metric.name + end for end in ends[metric.type]} for metric in registry.collect()}


def test_alert_rules_name_the_metrics_that_exist(registry: CollectorRegistry) -> None:
    """docs/how-to/lockkit.rules.yml."""
    known = set().union(*exported(registry).values())
    rules = yaml.safe_load((ROOT / "docs/how-to/lockkit.rules.yml").read_text())["groups"][0]["rules"]
    assert rules
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        used = re.findall(r"lockkit_\w+", rule["expr"])
        assert used
        assert set(used) <= known, rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_dashboard_shows_every_metric_and_no_other(registry: CollectorRegistry) -> None:
    """docs/how-to/lockkit-grafana.json."""
    metrics = exported(registry)
    dashboard = json.loads((ROOT / "docs/how-to/lockkit-grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"]]
    used = set(re.findall(r"lockkit_\w+", " ".join(queries)))

    assert used - set().union(*metrics.values()) == set()
    assert [name for name, series in metrics.items() if not series & used] == []
    assert [query for query in queries if query.count("(") != query.count(")")] == []


def test_failures(registry: CollectorRegistry, client: lockkit.Client) -> None:
    """Renewals, jeopardies, losses and requests that were undone."""
    with client.lock("a", label="a") as lease:
        lease.extend()
    with pytest.raises(lockkit.LockLost), client.lock("b", label="b"):
        client.break_lock("b")
    seen()
    unreachable, backend = scripted()
    backend.after["try_acquire"] = once(fail(BackendUnavailable("gone")))
    with pytest.raises(BackendUnavailable):
        unreachable.lock("c", label="c").acquire(timeout=0)

    assert value(registry, "renewals_total", "a") == 1
    assert value(registry, "losses_total", "b", reason="broken") == 1
    assert value(registry, "held", "b") == 0
    assert value(registry, "undone_total", "c", backend=unreachable.url) == 1
    assert value(registry, "acquisitions_total", "c", backend=unreachable.url, outcome="unavailable") == 1


HOLDER = """
import os
import lockkit
from lockkit import observers
from lockkit.integrations.prometheus import PrometheusObserver

lockkit.add_observer(PrometheusObserver())
lease = lockkit.connect("memory://prometheus").lock("a", label="a").acquire()
for channel in observers.active:
    channel.flush({patience})
print(os.getpid(), flush=True)
os._exit(1)
"""


def test_leases_of_a_killed_process_are_no_longer_counted(tmp_path: Path) -> None:
    """With metrics of several processes, as with gunicorn; the others' leases are one sum."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call] # of prometheus_client
    program = HOLDER.format(patience=PATIENCE)
    killed, _ = (int(run_python("-c", program, PROMETHEUS_MULTIPROC_DIR=str(tmp_path)).stdout) for _ in range(2))

    assert value(registry, "held", "a") == 2
    mark_process_dead(killed, str(tmp_path))  # type: ignore[no-untyped-call] # see above
    assert value(registry, "held", "a") == 1


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)

    with pytest.raises(lockkit.ConfigurationError, match=r"lockkit\[prometheus\]"):
        PrometheusObserver()
