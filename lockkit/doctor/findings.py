"""What the doctor looks for (`Check`) and what it found (`Finding`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lockkit.errors import DOCUMENTATION


class Severity(StrEnum):
    """
    How serious a finding is, the most serious first.

    - ``error``: locks can be lost or held twice although nothing fails, or do not work at all.
    - ``warning``: locks can be lost or held twice once a server, a network or a clock fails, or if another user
      interferes.
    - ``info``: it works as documented, and you should know it.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    def reaches(self, threshold: Severity) -> bool:
        """Tell whether it is at least as serious as `threshold`."""
        order = list(Severity)
        return order.index(self) <= order.index(threshold)


@dataclass(frozen=True, slots=True)
class Check:
    """
    One thing that the doctor looks for.

    Attributes:
        id: Stable name, the kind of server first: ``redis-eviction``.
        severity: The same in every finding, so that a threshold means the same everywhere.
        risk: What can happen to locks, a sentence.
        page: Documentation: a path below ``docs/``, with the heading.
    """

    id: str
    severity: Severity
    risk: str
    page: str

    @property
    def url(self) -> str:
        """Address of that page, for people who have no copy of ``docs/``."""
        return DOCUMENTATION + self.page.replace(".md", "/")


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One thing that the doctor found.

    Attributes:
        check: What the doctor looked for.
        where: The servers or directories, without passwords.
        seen: What the doctor found there, a sentence.
        fix: The command or setting that fixes it.
    """

    check: Check
    where: tuple[str, ...]
    seen: str
    fix: str

    def as_dict(self) -> dict[str, object]:
        """Return it in the form of the JSON output."""
        return {
            "id": self.check.id,
            "severity": self.check.severity.value,
            "where": list(self.where),
            "seen": self.seen,
            "risk": self.check.risk,
            "fix": self.fix,
            "page": self.check.page,
        }
