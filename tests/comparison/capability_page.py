"""Writes docs/comparison/capabilities.md from the capabilities that the backends declare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import lockkit
from lockkit.backend import Capabilities
from tests.comparison.markdown import by_line, table
from tests.conventions.sources import ROOT

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
    Subject("object stores", "s3://bucket", "object_store"),
    Subject("PostgreSQL", "postgresql://host/db", "sql_table"),
    Subject("MariaDB, MySQL", "mariadb://host/db", "sql_table"),
    Subject("SQLite", "sqlite:///locks.db", "sql_table"),
    Subject("PostgreSQL, `mode=row`", "postgresql://host/db?mode=row", "sql_row"),
    Subject("MariaDB, MySQL, `mode=row`", "mariadb://host/db?mode=row", "sql_row"),
    Subject("PostgreSQL, `mode=advisory`", "postgresql://host/db?mode=advisory", "sql_advisory"),
    Subject("MariaDB, MySQL, `mode=advisory`", "mariadb://host/db?mode=advisory", "sql_advisory"),
]

SCOPE = {"process": "threads, tasks", "machine": "processes here", "network": "machines"}
CRASH = {
    "ttl": "after the ttl",
    "session": "after its session",
    "connection": "with its connection",
    "process": "at once",
}
PERMITS = {"native": "together", "slots": "by slot", "none": "no"}
WAKEUP = {"push": "woken", "poll": "polling"}

HEAD = """\
# Capabilities

<!-- Written by `nox -s comparison` from the capabilities that the backends declare: change it there. -->

What each backend declares in `client.capabilities`; the [Backend API](../reference/backend-api.md) explains the terms.
The conformance suite reads the same data and tests each backend against it.
[Choose a backend](../choose/index.md) asks which of them you need.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """
    A table of a few columns, so narrow that a phone shows all of it.

    Attributes:
        title: Heading.
        text: What the columns mean.
        columns: What each is called, and what it shows.
    """

    title: str
    text: str
    columns: Mapping[str, Callable[[Capabilities], str]]


def seconds(value: float) -> str:
    """A time as people read it."""
    if value == 0:
        return "not"
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    raise ValueError(value)


def yes_no(value: bool) -> str:  # noqa: FBT001 - what is shown
    """A word for a truth."""
    return "yes" if value else "no"


PARTS = (
    Part(
        "What is locked out, and what survives",
        "Held locks after a server is lost: whether a lock that is held stays exclusive when one server, or disk, "
        "is lost for good.",
        {
            "locks out other": lambda can: SCOPE[can.scope],
            "held locks after a server is lost": lambda can: "kept" if can.survives_node_loss else "**lost**",
        },
    ),
    Part(
        "Tokens after data is lost",
        "Whether tokens keep increasing after *all* data are lost, so that storage still rejects an older holder. "
        "It says nothing about held locks.",
        {
            "tokens after data is lost": lambda can: "increase" if can.survives_data_loss else "**may start lower**",
        },
    ),
    Part(
        "A dead holder, and who comes next",
        "When a lock is free whose holder died, how the next one is woken, and whether that is the first that came.",
        {
            "a dead holder's lock is free": lambda can: CRASH[can.crash_release],
            "waiters are": lambda can: WAKEUP[can.wakeup],
            "in order": lambda can: yes_no(can.fair),
        },
    ),
    Part(
        "Length of a ttl",
        "The shortest ttl, and what a ttl is rounded up to.",
        {
            "shortest": lambda can: seconds(can.min_ttl),
            "rounded up to": lambda can: seconds(can.ttl_granularity),
        },
    ),
    Part(
        "Beyond one lock",
        "Read locks (`client.rwlock`), notes (`client.once`) and a list of held locks (`client.names`).",
        {
            "rwlock": lambda can: yes_no(can.shared_mode),
            "once": lambda can: yes_no(can.notes),
            "names": lambda can: yes_no(can.listing),
        },
    ),
    Part(
        "Readers, writers and permits",
        "Whether a waiting writer stops new readers, a write lease can become a read lease in one step "
        "(`lease.downgrade`), and whether the permits of a semaphore are kept together or as a lock for each slot.",
        {
            "fair": lambda can: yes_no(can.fair_shared),
            "downgrade": lambda can: yes_no(can.downgrade),
            "permits": lambda can: PERMITS[can.permits],
        },
    ),
    Part(
        "What others see of a lock",
        "Whether `holders` tells how many wait, and the holder can replace its metadata (`lease.update`).",
        {
            "waiters": lambda can: yes_no(can.waiters_visible),
            "new metadata": lambda can: yes_no(can.metadata_update),
        },
    ),
)


def text() -> str:
    """The whole page."""
    lines = [HEAD]
    for part in PARTS:
        lines += [f"## {part.title}", "", part.text.replace(". ", ".\n"), ""]
        rows = [
            [subject.link, *(column(subject.capabilities) for column in part.columns.values())] for subject in BACKENDS
        ]
        lines += [*table(["backend", *part.columns], rows), ""]
    for title, field in (
        ("Where tokens come from", "token_source"),
        ("Clock requirements", "clock_assumption"),
        ("Known limits", "caveat"),
    ):
        lines += [f"## {title}", ""]
        same: dict[str, list[str]] = {}
        for subject in BACKENDS:
            same.setdefault(getattr(subject.capabilities, field), []).append(subject.link)
        # A list, because a sentence in a narrow column is hard to read.
        for sentence, links in same.items():
            lines += [f"- {', '.join(links)}: {by_line(sentence)}"]
        lines += [""]
    return "\n".join(lines).rstrip("\n") + "\n"
