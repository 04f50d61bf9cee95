"""The questions of docs/choose: read from the file that the page is made of, and answered."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import lockkit
from lockkit.backend import Capabilities
from tests.conventions.sources import ROOT

DATA = ROOT / "docs" / "choose" / "decision.toml"


@dataclass(frozen=True, slots=True)
class Answer:
    """
    One answer to a question; a reader clicks on its `text`, and `short` is the same in a list of answers given.

    Attributes:
        go: The question or the backend that follows.
        advice: What to do beside the lock; empty: nothing.
        instead: Where it leads after another answer, by that one's id.
        requires: The values that capabilities of every backend behind this answer may have.
    """

    id: str
    text: str
    short: str
    go: str
    advice: str = ""
    instead: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, Sequence[object]] = field(default_factory=dict)

    def leads_to(self, given: Iterable[str]) -> str:
        """The question or the backend that follows after these answers."""
        return next((self.instead[each] for each in given if each in self.instead), self.go)


@dataclass(frozen=True, slots=True)
class Question:
    """One question, and why it is asked."""

    ask: str
    why: str
    answer: Sequence[Answer]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another backend, and in which case it is the better one."""

    go: str
    when: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do beside the lock, in a few words and in sentences."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Backend:
    """
    A recommendation, and why this one.

    Attributes:
        url: What to paste; empty: there is no lock service, and `code` is pasted, with `check` for the doctor.
        page: Its page in docs/backends; empty without URL.
        promises: Sentences, where no capabilities say it; `limits` likewise.
        caveat: In place of the one that the backend declares, where it depends on the URL.
        more: Links, after the page of the backend.
    """

    title: str
    because: str
    url: str = ""
    page: str = ""
    promises: Sequence[str] = ()
    limits: Sequence[str] = ()
    code: str = ""
    check: str = ""
    caveat: str = ""
    more: str = ""
    alternative: Sequence[Alternative] = ()

    @property
    def capabilities(self) -> Capabilities:
        """What it says of itself, with the caveat of this URL."""
        with lockkit.connect(self.url) as client:
            can = client.capabilities
        return replace(can, caveat=self.caveat) if self.caveat else can


@dataclass(frozen=True, slots=True)
class Choice:
    """All that the page is made of: the question to begin with, and everything by name."""

    first: str
    questions: Mapping[str, Question]
    advice: Mapping[str, Advice]
    backends: Mapping[str, Backend]


@cache
def load() -> Choice:
    """Read the file. A word in it that means nothing is an error."""
    raw: dict[str, Any] = tomllib.loads(DATA.read_text())
    return Choice(
        first=raw["first"],
        questions={
            name: Question(**entry | {"answer": [Answer(**answer) for answer in entry["answer"]]})
            for name, entry in raw["question"].items()
        },
        advice={name: Advice(**entry) for name, entry in raw["advice"].items()},
        backends={
            name: Backend(**entry | {"alternative": [Alternative(**other) for other in entry.get("alternative", ())]})
            for name, entry in raw["backend"].items()
        },
    )


def paths(
    choice: Choice, name: str | None = None, given: tuple[Answer, ...] = ()
) -> Iterator[tuple[tuple[Answer, ...], str]]:
    """All ways through the questions: the answers, and the backend that they end at."""
    name = choice.first if name is None else name
    if name in choice.backends:
        yield given, name
        return
    for answer in choice.questions[name].answer:
        yield from paths(choice, answer.leads_to(each.id for each in given), (*given, answer))


@dataclass(frozen=True, slots=True)
class Need:
    """What somebody comes with, the ids of the answers that they would give, and what the page should say to that."""

    story: str
    answers: Sequence[str]
    backend: str
    advice: Sequence[str]


def _need(story: str, answers: str, backend: str, advice: str) -> Need:
    return Need(story, answers.split(), backend, advice.split())


NEEDS = (
    _need("threads of one web process fill a cache once", "one twice process", "memory", "one efficiency"),
    _need(
        "a cron job of one server must not overlap with itself", "one twice machine directory", "file", "one efficiency"
    ),
    _need("a desktop tool keeps its data in SQLite", "one store machine sqlite", "sqlite", "one guard"),
    _need("seats are rows in PostgreSQL, sold in one transaction", "database", "transaction", ""),
    _need(
        "pods update a stock in PostgreSQL, with a version in each row",
        *("one store machines postgresql table", "postgresql", "one guard"),
    ),
    _need(
        "a few workers with PostgreSQL are often killed, and nobody wants to wait for a ttl",
        *("one twice machines postgresql advisory", "postgresql-advisory", "one efficiency"),
    ),
    _need("a shop on MariaDB, thousands of orders", "one store machines mysql my-table", "mariadb", "one guard"),
    _need("a leader in a cluster that runs ZooKeeper", "leader store machines zookeeper", "zookeeper", "leader guard"),
    _need(
        "only Redis, on five independent machines, and locks must survive one of them",
        *("one store machines redis five", "redlock", "one guard"),
    ),
    _need(
        "only one Redis, but locks must survive its loss",
        *("one outside machines redis survive", "etcd", "one outside"),
    ),
    _need(
        "tickets are sold on Redis with Sentinel", "one store machines redis sentinel", "redis-sentinel", "one guard"
    ),
    _need(
        "ElastiCache, and imports that must not overlap",
        "one store machines redis managed",
        "redis-managed",
        "one guard",
    ),
    _need(
        "Celery workers with a Redis broker charge cards", "once outside machines redis single", "redis", "once outside"
    ),
    _need(
        "seats on a Redis with two replicas, which Kubernetes promotes",
        *("one store machines redis replicas", "redis-replicas", "one guard"),
    ),
    _need(
        "a catalogue on MySQL with many readers, woken at once",
        *("readers store machines mysql my-advisory", "mariadb-row", "readers guard"),
    ),
)
