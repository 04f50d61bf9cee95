"""What the tests of the doctor have in common: examine a URL, and look at what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockkit.doctor import Severity, examine

if TYPE_CHECKING:
    from lockkit.doctor import Diagnosis, Finding

SECRET = "hunter2"  # noqa: S105 - of servers that live for a test


def found(url: str, *, ttl: float | None = None) -> dict[str, Finding]:
    """Examines a URL; gives the findings by id, after a look that none of them shows the password."""
    diagnosis = examine(url, ttl=ttl)
    assert SECRET not in repr(diagnosis)
    assert SECRET not in repr(diagnosis.as_dict())
    for finding in diagnosis.findings:
        # A sentence each: what is empty or cut off helps nobody.
        assert finding.where
        assert finding.seen.endswith(".")
        assert finding.fix
    return {finding.check.id: finding for finding in diagnosis.findings}


def complaints(diagnosis: Diagnosis) -> list[str]:
    """The errors and warnings, which a server that is set up well gives no reason for."""
    return [f"{finding.check.id}: {finding.seen}" for finding in diagnosis.reaching(Severity.WARNING)]
