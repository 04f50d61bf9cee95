"""The documentation of the doctor agrees with its code."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import lockkit.backends
import lockkit.doctor
import lockkit.errors
from lockkit.doctor import Check

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "check-your-servers.md"


def checks() -> list[Check]:
    """All that the doctor looks for, each once though several modules may import it."""
    names = [f"lockkit.doctor.{module.name}" for module in pkgutil.iter_modules(lockkit.doctor.__path__)]
    backends = pkgutil.walk_packages(lockkit.backends.__path__, "lockkit.backends.")
    names += [module.name for module in backends if ".examine" in module.name]
    found: dict[str, Check] = {}
    for name in names:
        names_in = vars(importlib.import_module(name))
        for value in [*names_in.values(), *names_in.get("CHECKS", {}).values()]:
            if isinstance(value, Check):
                assert found.setdefault(value.id, value) is value, f"two findings have the id {value.id}"
    return list(found.values())


def test_page_lists_every_finding_with_its_severity() -> None:
    """Scripts rely on names and severities."""
    listed = dict(re.findall(r"^\| `([a-z-]+)` \| (error|warning|info) \| ", PAGE.read_text(), re.MULTILINE))

    assert listed == {check.id: check.severity.value for check in checks()}


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.id)
def test_finding_leads_to_a_heading(check: Check) -> None:
    """The page that a finding names exists and has that heading."""
    name, _, anchor = check.page.partition("#")
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / name).read_text(), re.MULTILINE)

    assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}
    assert check.url == f"{lockkit.errors.DOCUMENTATION}{name.removesuffix('.md')}/" + (f"#{anchor}" if anchor else "")
    assert check.risk.endswith(".")


def test_every_finding_is_made_by_a_test() -> None:
    """Each finding occurs in a test of the doctor or of a backend's examination."""
    tests = ROOT / "tests"
    files = [*tests.glob("doctor/test_*.py"), *tests.glob("backends/**/test_examine*.py"), tests / "cli/test_doctor.py"]
    files.append(tests / "backends/redis/test_tls.py")
    sources = "".join(path.read_text() for path in files)
    # A test makes the two ids of appendfsync from one pattern.
    sources += 'redis-appendfsync-no" "redis-appendfsync-everysec"' if "redis-appendfsync-{value}" in sources else ""

    assert [check.id for check in checks() if f'{check.id}"' not in sources] == []
