"""What the doctor finds in the number of members of a cluster that decides by majority: etcd, ZooKeeper."""

from __future__ import annotations

from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity

MEMBERS_MIN = 3
"""The smallest cluster of which one member may fail."""

_FIX = "Run 3 or 5 members on different machines, and name all of them in the URL"


def member_checks(kind: str, page: str) -> tuple[Check, Check, Check, Check]:
    """Give the checks that `judge_members` takes: one member, too few, an even number, one of several named."""

    def check(name: str, risk: str) -> Check:
        return Check(f"{kind}-{name}", Severity.WARNING, risk, page)

    return (
        check(
            "alone", "While the member is down, no lock can be acquired, and leases are lost at the end of their ttl."
        ),
        check("few-members", "When one member fails, no majority is left, and no lock can be acquired."),
        check("even-members", "An even number survives no more failures than one member fewer."),
        check(
            "one-named",
            "When that member is down, clients do not find the others, and lose their leases although the cluster "
            "works.",
        ),
    )


def judge_members(examination: Examination, checks: tuple[Check, Check, Check, Check], count: int) -> None:
    """Report what is wrong with the number of voting members, and of those that the URL names."""
    alone, few, even, one_named = checks
    where = examination.url.safe_text
    if count <= 1:
        examination.find(alone, where, "The cluster has one member.", _FIX)
        return
    examination.note("members", str(count))
    if count < MEMBERS_MIN:
        examination.find(few, where, f"The cluster has {count} members.", _FIX)
    elif count % 2 == 0:
        examination.find(even, where, f"The cluster has {count} members.", _FIX)
    if len(examination.url.hosts) == 1:
        examination.find(one_named, where, f"The URL names one member of {count}.", "Name all of them in the URL")
