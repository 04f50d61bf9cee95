"""
What each extra of lockkit installs, and how long what it brings takes to import: ``nox -s comparison -- extras``.

Each extra gets an empty virtual environment of its own, so this downloads what the extras name, about 200 MB.
"""

from __future__ import annotations

import datetime as dt
import json
import platform
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.comparison.runs import RUNS, dump, short
from tests.conventions.sources import ROOT

EXTRAS = RUNS / "extras.json"

ROUNDS = 15
"""So many imports of each kind, in turns; the least counts."""


@dataclass(frozen=True, slots=True)
class Imports:
    """
    What is timed for an extra.

    Attributes:
        ours: With lockkit.
        theirs: What lockkit builds on, alone: what a program that uses it anyway has imported already.
    """

    ours: str
    theirs: str


def _connect(url: str) -> str:
    return f"import lockkit; lockkit.connect({url!r})"


def _integration(name: str) -> str:
    return f"import lockkit.integrations.{name}"


IMPORTS = {
    "": Imports("import lockkit", "pass"),
    "redis": Imports(_connect("redis://host"), "import redis; redis.Redis()"),
    "zookeeper": Imports(_connect("zookeeper://host"), "from kazoo.client import KazooClient; KazooClient()"),
    "etcd": Imports(_connect("etcd://host"), "import grpc, google.protobuf.message"),
    "objects": Imports(_connect("s3://bucket"), "import obstore.store, asyncio"),
    "sql": Imports("from lockkit.fencing import SqlGuard", "import sqlalchemy"),
    "postgresql": Imports(_connect("postgresql://host/db"), "import psycopg"),
    "mysql": Imports(_connect("mysql://host/db"), "import pymysql"),
    "cli": Imports("import lockkit.cli.app", "import typer, rich"),
    "prometheus": Imports(_integration("prometheus"), "import prometheus_client"),
    "opentelemetry": Imports(_integration("opentelemetry"), "import opentelemetry.trace, opentelemetry.metrics"),
    "celery": Imports(_integration("celery"), "from celery import Celery, Task"),
    "apscheduler": Imports(_integration("apscheduler"), "import apscheduler.schedulers.background"),
    "dramatiq": Imports(_integration("dramatiq"), "import dramatiq"),
    "rq": Imports(_integration("rq"), "import rq"),
    "alembic": Imports(_integration("alembic"), "import alembic.command"),
    "django": Imports(_integration("django"), "import django.apps, django.conf, django.db"),
    "fastapi": Imports(_integration("fastapi"), "import fastapi"),
    "testing": Imports("import lockkit.testing.conformance", "import pytest, hypothesis"),
}
"""What is imported for each extra; "" is lockkit without one, and `all` needs nothing of its own."""


def declared() -> list[str]:
    """The extras of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"])


def record() -> None:
    """Measure all extras, and keep the result."""
    with tempfile.TemporaryDirectory() as folder:
        dist = Path(folder, "dist")
        _pip("wheel", "--no-deps", "--wheel-dir", str(dist), str(ROOT))
        (wheel,) = dist.iterdir()
        extras = {extra: _measure(extra, wheel, Path(folder, extra or "none")) for extra in ["", *declared()]}
    month = dt.datetime.now(dt.UTC).strftime("%B %Y")
    data = {"python": platform.python_version(), "measured": month, "rounds": ROUNDS, "extras": extras}
    EXTRAS.write_text(dump(data))


def _measure(extra: str, wheel: Path, folder: Path) -> dict[str, Any]:
    """Install one extra into an environment of its own; say what that installed, and what importing it takes."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    _pip("--python", str(python), "install", f"{wheel}[{extra}]" if extra else str(wheel))
    (site,) = folder.glob("lib/python*/site-packages")
    packages = sorted({path.name.split("-")[0].lower() for path in site.glob("*.dist-info")} - {"lockkit"})
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    measured = {"packages": packages, "mb": round(size / 1e6, 1)}
    if extra not in IMPORTS:
        return measured
    return measured | _import_ms(python, IMPORTS[extra])


def _import_ms(python: Path, imports: Imports) -> dict[str, float]:
    """How long both imports take beyond a bare Python: the least of `ROUNDS`, in turns, ms."""
    kinds = {"ours_ms": imports.ours, "theirs_ms": imports.theirs}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        for kind, code in kinds.items():
            script = f"import time; start = time.perf_counter(); {code}; print(time.perf_counter() - start)"
            answer = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True)
            times[kind].append(float(answer.stdout) * 1000)
    return {kind: short(min(values)) for kind, values in times.items()}


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def load() -> dict[str, Any]:
    """The committed run."""
    data: dict[str, Any] = json.loads(EXTRAS.read_text())
    return data
