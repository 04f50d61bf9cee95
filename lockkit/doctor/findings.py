"""What the doctor can find, and what it found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Check", "Finding", "Severity"]


class Severity(StrEnum):
    """
    How bad it is, the worst first.

    - ``error``: locks can be lost or held twice without anything failing, or do not work at all.
    - ``warning``: they can once something fails: a server, a network, a clock; or somebody may interfere.
    - ``info``: works as described, and is worth knowing.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    def reaches(self, threshold: Severity) -> bool:
        """Tell whether it is as bad as `threshold`, or worse."""
        order = list(Severity)
        return order.index(self) <= order.index(threshold)


@dataclass(frozen=True, slots=True)
class Check:
    """
    One thing that is looked for.

    Attributes:
        id: Stable name, the kind of server first: ``redis-eviction``.
        severity: Always the same, so that a threshold means the same everywhere.
        risk: What can happen to locks, as a sentence.
        page: Where the documentation says more: a path below ``docs/``, with its heading.
    """

    id: str
    severity: Severity
    risk: str
    page: str


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One thing that was found.

    Attributes:
        check: What was looked for.
        where: Which servers or directories, without passwords.
        seen: What was seen there, as a sentence.
        fix: The command or setting that fixes it.
    """

    check: Check
    where: tuple[str, ...]
    seen: str
    fix: str

    def as_dict(self) -> dict[str, object]:
        """Give it as JSON has it."""
        return {
            "id": self.check.id,
            "severity": self.check.severity.value,
            "where": list(self.where),
            "seen": self.seen,
            "risk": self.check.risk,
            "fix": self.fix,
            "page": self.check.page,
        }
