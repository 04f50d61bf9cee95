"""For the tests of the doctor: examine a URL and return the findings."""

from __future__ import annotations

from lockkit.doctor import Diagnosis, Finding, Severity, examine

SECRET = "hunter2"  # noqa: S105 - of servers that live for a test


def found(url: str, *, ttl: float | None = None) -> dict[str, Finding]:
    """Examine a URL; return the findings by id, after checking that none of them shows the password."""
    diagnosis = examine(url, ttl=ttl)
    assert SECRET not in repr(diagnosis)
    assert SECRET not in repr(diagnosis.as_dict())
    for finding in diagnosis.findings:
        # Each is a complete sentence.
        assert finding.where
        assert finding.seen.endswith(".")
        assert finding.fix
    return {finding.check.id: finding for finding in diagnosis.findings}


def complaints(diagnosis: Diagnosis) -> list[str]:
    """The errors and warnings. A well-configured server has none."""
    return [f"{finding.check.id}: {finding.seen}" for finding in diagnosis.reaching(Severity.WARNING)]
