"""
The backends in distributions of their own, installed as a stranger's and run on their servers.

Here the one for NATS runs what is its own and a part of the conformance suite; `nox -s backends` runs all of both. The
stand-in for DynamoDB comes from npm, which the tests of lockkit itself do without.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from lockkit_tools.servers import require
from tests.conventions.sources import ROOT
from tests.programs import LIMIT, printed

BACKENDS = ROOT / "examples" / "backends"
# Exclusion, tokens, expiry, renewal, release, waiting, names, a crash, on both APIs; and cancelling.
SMOKE = [
    *("test_clients_exclude_each_other", "test_tokens_increase_from_grant_to_grant"),
    *("test_lease_that_nobody_renews_ends", "test_renewal_keeps_the_lock_beyond_its_ttl"),
    *("test_release_of_a_broken_lease_leaves_the_next_holder_alone", "test_token_stays_while_held"),
    *("test_names_with_a_meaning_elsewhere_are_names_here", "test_killed_holder_is_replaced_after_its_ttl"),
]
ASYNCIO = ["test_cancelled_waiters_leave_nothing_behind"]


def installed(project: Path, target: Path) -> Mapping[str, str]:
    """Install a distribution from its folder, without a network; give the settings under which Python finds it."""
    offline = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    printed("-m", "pip", "install", "--quiet", *offline, f"--target={target}", project, cwd=target.parent)
    return {"PYTHONPATH": f"{target}{os.pathsep}{ROOT}"}


@pytest.mark.slow
@pytest.mark.timeout(LIMIT * 2)
def test_installed_backend_passes(tmp_path: Path) -> None:
    """Its own tests, and cases of the conformance suite on both APIs."""
    require("nats")
    project = BACKENDS / "lockkit-nats"
    settings = installed(project, tmp_path / "installed")
    selected = " or ".join(["not TestConformance", *SMOKE, *ASYNCIO])

    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selected, "tests")
    out = printed(*command, cwd=project, without=["PYTEST_"], **settings)

    passed = dict(re.findall(r"\((blocking|asyncio)\): (\d+) passed, 0 failed, 0 not promised, 0 skipped", out))
    assert passed == {"blocking": f"{len(SMOKE)}", "asyncio": f"{len(SMOKE + ASYNCIO)}"}, out


@pytest.mark.parametrize("name", ["nats", "dynamodb"])
def test_backend_uses_public_modules_alone(name: str) -> None:
    """What a stranger may rely on: the modules that the tutorial and the reference describe."""
    sources = (BACKENDS / f"lockkit-{name}").glob("src/**/*.py")
    imported = {
        module for source in sources for module in re.findall(r"from (lockkit\.[\w.]+) import", source.read_text())
    }

    assert imported <= {f"lockkit.{name}" for name in ("backend", "drivers", "errors", "runtime", "url")}
