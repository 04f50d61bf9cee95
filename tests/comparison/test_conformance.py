"""A run of the conformance suite leaves what the site shows of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conventions.sources import ROOT
from tests.docs import counts


def test_run_is_kept_and_drawn(tmp_path: Path) -> None:
    """What passed, and why what was left out did not apply, on the backend that it is about; packages have no row."""
    path = tmp_path / "run.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--numprocesses=1",
        "tests/conformance/test_suite.py",
        "packages/lockkit-nats",
        "--target=memory",
        "-k",
        "ping or metadata",
    ]

    subprocess.run([*command, f"--conformance-report={path}"], cwd=ROOT, capture_output=True, timeout=110, check=True)

    found = json.loads(path.read_text())
    memory = found["backends"][0]
    assert memory["backend"] == "memory"
    assert memory["counts"]["passed"] > 0
    assert sum(memory["reasons"].values()) == memory["counts"].get("not promised", 0)
    assert f"| memory | {memory['counts']['passed']} |" in counts.counts(found)
    assert f"{memory['counts']['passed']} passed and 0 failed" in counts.words(found)
    assert counts.failures(found) == "No case failed."


def test_failures_and_reasons_are_drawn() -> None:
    """Each by the backend that it is about; nothing breaks a cell."""
    row = {"backend": "b", "counts": {"failed": 1}, "reasons": {"no a|b": 2}, "failed": ["test_x[b-asyncio]"]}

    found = {"date": "2026-11-27", "version": "1", "backends": [row]}

    assert counts.failures(found).splitlines()[-1] == "| b | `test_x[b-asyncio]` |"
    assert counts.reasons(found).splitlines()[-1] == "| b | no a/b | 2 |"
    assert counts.counts(found).splitlines()[-1] == "| b | 0 | 0 | 0 | 1 |"
