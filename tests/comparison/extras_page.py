"""Writes docs/reference/extras.md from what `tests.comparison.extras` measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.comparison.extras import load
from tests.comparison.markdown import table
from tests.conventions.sources import ROOT

PAGE = ROOT / "docs" / "reference" / "extras.md"

ADDS = {
    "redis": "[Redis](../backends/redis.md) and [Redlock](../backends/redlock.md)",
    "zookeeper": "[ZooKeeper](../backends/zookeeper.md)",
    "etcd": "[etcd](../backends/etcd.md)",
    "objects": "[object stores](../backends/object_store.md)",
    "sql": "[guards, updates and `lock_in`](../how-to/guard-your-storage.md) over SQLAlchemy",
    "postgresql": "[PostgreSQL](../backends/sql_table.md)",
    "mysql": "[MariaDB and MySQL](../backends/sql_table.md)",
    "cli": "[the command `lockkit`](cli.md)",
    "prometheus": "[metrics for Prometheus](../how-to/observe.md)",
    "opentelemetry": "[traces and metrics of OpenTelemetry](../how-to/observe.md)",
    "celery": "[tasks under a lock, a beat that may run twice](../integrations/celery.md)",
    "apscheduler": "[jobs on the leader only](../integrations/apscheduler.md)",
    "dramatiq": "[actors under a lock](../integrations/dramatiq.md)",
    "rq": "[jobs under a lock](../integrations/rq.md)",
    "alembic": "[one process migrates](../integrations/alembic.md)",
    "django": "[clients in settings, `migrate_locked`](../integrations/django.md)",
    "fastapi": "[locks for endpoints, one leader, idempotency keys](../integrations/fastapi.md)",
    "testing": "[the conformance suite](../tutorials/write-a-backend.md); "
    "the [fixtures for your tests](../how-to/test-your-code.md) need pytest alone",
    "all": "all of these but the frameworks (Celery to FastAPI), which an application that uses them has already",
}
"""What each extra adds to lockkit."""

HEAD = """\
<!-- Written by `nox -s comparison -- extras`; a change by hand is lost. -->

# Extras

lockkit itself depends on no other package.
`pip install lockkit` has the [memory](../backends/memory.md), [file](../backends/file.md) and
[SQLite](../backends/sql_table.md) backends, and all integrations that are not listed here.
An extra brings what one backend or integration needs: `pip install "lockkit[redis]"`, or several at once,
`pip install "lockkit[redis,cli]"`.
lockkit is not on the package index yet: in a clone, write `.` in place of `lockkit`, as in `pip install ".[redis]"`.

Importing lockkit imports no driver.
A driver is imported when you connect to its backend, a framework when you import its integration.
"""


def text() -> str:
    """The page."""
    return "\n".join(_lines(load())) + "\n"


def _lines(run: Mapping[str, Any]) -> Iterator[str]:
    bare = run["extras"][""]
    yield HEAD
    yield "## What an extra costs"
    yield ""
    yield from table(
        ["extra", "adds", "packages", "MB", "import, ms", "of which lockkit"],
        [_row(extra, run["extras"][extra], bare["mb"]) for extra in ADDS],
    )
    yield ""
    yield f"""\
- *packages* and *MB* are what the extra installs beyond lockkit, which takes {bare["mb"]:g} MB when compiled.
- *import, ms* is `lockkit.connect()` to that backend, or importing the integration or tool, beyond a bare Python.
- *of which lockkit* leaves out the imports of the driver or framework, which an application that uses it has made
  already. `import lockkit` alone takes {bare["ours_ms"]:.0f} ms.

Measured on Python {run["python"]} with the newest releases of {run["measured"]}, each extra in an empty environment:
the least of {run["rounds"]} imports, each in a new process. `nox -s comparison -- extras` repeats it.
Your machine is faster or slower; what counts is the proportion."""


def _row(extra: str, measured: Mapping[str, Any], bare_mb: float) -> list[str]:
    row = [f"`{extra}`", ADDS[extra], str(len(measured["packages"])), f"{measured['mb'] - bare_mb:.1f}"]
    if "ours_ms" not in measured:
        return [*row, "", ""]
    ours, theirs = measured["ours_ms"], measured["theirs_ms"]
    return [*row, f"{ours:.0f}", f"{max(0.0, ours - theirs):.0f}"]
