"""The documentation of the doctor agrees with its code."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

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


def test_findings_lead_to_headings() -> None:
    """The page that a finding names exists and has that heading."""
    for check in checks():
        name, _, anchor = check.page.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / name).read_text(), re.MULTILINE)
        page = f"{lockkit.errors.DOCUMENTATION}{name.removesuffix('.md')}/"

        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}, check.id
        assert check.url == page + (f"#{anchor}" if anchor else ""), check.id
        assert check.risk.endswith("."), check.id


def test_every_finding_is_made_by_a_test() -> None:
    """Each finding occurs in a test of the doctor or of a backend's examination."""
    tests = ROOT / "tests"
    files = [*tests.glob("doctor/test_*.py"), *tests.glob("backends/**/test_examine*.py"), tests / "cli/test_doctor.py"]
    files += [tests / "backends/redis/test_tls.py", tests / "backends/sql/test_galera.py"]
    sources = "".join(path.read_text() for path in files)
    # A test makes the two ids of appendfsync from one pattern.
    sources += 'redis-appendfsync-no" "redis-appendfsync-everysec"' if "redis-appendfsync-{value}" in sources else ""

    assert [check.id for check in checks() if f'{check.id}"' not in sources] == []
