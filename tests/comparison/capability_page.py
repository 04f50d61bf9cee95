"""Writes docs/comparison/capabilities.md from the capabilities that the backends declare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import lockkit
from tests.comparison.markdown import table
from tests.conventions.sources import ROOT

if TYPE_CHECKING:
    from lockkit.backend import Capabilities

__all__ = ["BACKENDS", "PAGE", "Subject", "text"]

PAGE = ROOT / "docs" / "comparison" / "capabilities.md"


@dataclass(frozen=True, slots=True)
class Subject:
    """
    A backend as users meet it.

    Attributes:
        title: How it is called.
        url: An example, to which nothing is sent.
        page: Its page in docs/backends.
    """

    title: str
    url: str
    page: str

    @property
    def link(self) -> str:
        """The title, leading to the page."""
        return f"[{self.title}](../backends/{self.page}.md)"

    @property
    def capabilities(self) -> Capabilities:
        """What it says of itself."""
        with lockkit.connect(self.url) as client:
            return client.capabilities


BACKENDS = [
    Subject("memory", "memory://", "memory"),
    Subject("file", "file:", "file"),
    Subject("Redis", "redis://host", "redis"),
    Subject("Redlock, five nodes", "redlock://h1,h2,h3,h4,h5", "redlock"),
    Subject("ZooKeeper, three servers", "zookeeper://h1,h2,h3", "zookeeper"),
    Subject("etcd, three members", "etcd://h1,h2,h3", "etcd"),
    Subject("PostgreSQL", "postgresql://host/db", "sql_table"),
    Subject("MariaDB, MySQL", "mariadb://host/db", "sql_table"),
    Subject("SQLite", "sqlite:///locks.db", "sql_table"),
    Subject("PostgreSQL, `mode=row`", "postgresql://host/db?mode=row", "sql_row"),
    Subject("MariaDB, MySQL, `mode=row`", "mariadb://host/db?mode=row", "sql_row"),
    Subject("PostgreSQL, `mode=advisory`", "postgresql://host/db?mode=advisory", "sql_advisory"),
    Subject("MariaDB, MySQL, `mode=advisory`", "mariadb://host/db?mode=advisory", "sql_advisory"),
]

SCOPE = {"process": "threads and tasks", "machine": "processes of a machine", "network": "machines"}
CRASH = {
    "ttl": "after the ttl",
    "session": "after the session's timeout",
    "connection": "when its connection ends",
    "process": "at once",
}
WAKEUP = {"push": "woken", "poll": "polling"}

HEAD = (
    "# Capabilities\n\n"
    "<!-- Written by `nox -s comparison` from the capabilities that the backends declare: change it there. -->\n\n"
    "What each backend declares in `client.capabilities`; "
    "the [Backend API](../reference/backend-api.md) explains the terms.\n"
    "The conformance suite reads the same data and tests each backend against it.\n\n"
    "## At a glance\n"
)


def seconds(value: float) -> str:
    """A time as people read it."""
    if value == 0:
        return "not at all"
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    raise ValueError(value)


def yes_no(value: bool) -> str:  # noqa: FBT001 - what is shown
    """A word for a truth."""
    return "yes" if value else "no"


def glance(subject: Subject) -> list[str]:
    """One row of the first table."""
    can = subject.capabilities
    return [
        subject.link,
        SCOPE[can.scope],
        CRASH[can.crash_release],
        seconds(can.min_ttl),
        seconds(can.ttl_granularity),
        yes_no(can.fair),
        WAKEUP[can.wakeup],
        yes_no(can.survives_node_loss),
        yes_no(can.survives_data_loss),
        yes_no(can.listing),
        yes_no(can.notes),
        yes_no(can.shared_mode),
    ]


def text() -> str:
    """The whole page."""
    lines = [HEAD]
    lines += table(
        [
            "backend",
            "excludes",
            "a dead holder's lock is free",
            "shortest ttl",
            "a ttl is rounded up to",
            "first come, first served",
            "waiters are",
            "locks survive the loss of a server",
            "tokens keep increasing after data loss",
            "lists the locks that are held",
            "notes on locks (`client.once`)",
            "read locks (`client.rwlock`)",
        ],
        [glance(subject) for subject in BACKENDS],
    )
    for title, field in (
        ("Where tokens come from", "token_source"),
        ("Clock requirements", "clock_assumption"),
        ("Known limits", "caveat"),
    ):
        lines += ["", f"## {title}", ""]
        rows = [[subject.link, getattr(subject.capabilities, field)] for subject in BACKENDS]
        lines += table(["backend", title.lower()], rows)
    return "\n".join(lines) + "\n"
