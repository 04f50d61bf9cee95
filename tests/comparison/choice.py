"""The questions of docs/choose: read from the file that the page is made of, and answered."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import lockkit
from tests.conventions.sources import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lockkit.backend import Capabilities

__all__ = ["DATA", "NEEDS", "Advice", "Alternative", "Answer", "Backend", "Choice", "Need", "Question", "load", "paths"]

DATA = ROOT / "docs" / "choose" / "decision.toml"


@dataclass(frozen=True, slots=True)
class Answer:
    """
    One answer to a question.

    Attributes:
        id: Its name within the question.
        text: What the reader clicks on.
        short: The same in a few words, for the list of answers given.
        go: The question or the backend that follows.
        advice: What to do beside the lock; empty: nothing.
        requires: The values that capabilities of every backend behind this answer may have.
    """

    id: str
    text: str
    short: str
    go: str
    advice: str = ""
    requires: Mapping[str, Sequence[object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Question:
    """
    One question.

    Attributes:
        ask: The question.
        why: What it is about.
        answer: All answers.
    """

    ask: str
    why: str
    answer: Sequence[Answer]


@dataclass(frozen=True, slots=True)
class Alternative:
    """
    Another backend.

    Attributes:
        go: Its name.
        when: In which case it is the better one.
    """

    go: str
    when: str


@dataclass(frozen=True, slots=True)
class Advice:
    """
    What to do beside the lock.

    Attributes:
        title: In a few words.
        text: In sentences.
    """

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Backend:
    """
    A recommendation.

    Attributes:
        title: How the backend is called.
        because: Why this one.
        url: What to paste; empty: there is no lock service.
        page: Its page in docs/backends; empty without URL.
        promises: Sentences, where no capabilities say it.
        limits: As `promises`.
        check: The command that checks the servers, where there is no URL.
        more: Links, in place of the page of a backend.
        alternative: Others, and when they are better.
    """

    title: str
    because: str
    url: str = ""
    page: str = ""
    promises: Sequence[str] = ()
    limits: Sequence[str] = ()
    check: str = ""
    more: str = ""
    alternative: Sequence[Alternative] = ()

    @property
    def capabilities(self) -> Capabilities:
        """What it says of itself."""
        with lockkit.connect(self.url) as client:
            return client.capabilities


@dataclass(frozen=True, slots=True)
class Choice:
    """
    All that the page is made of.

    Attributes:
        first: The question to begin with.
        questions: By name.
        advice: By name.
        backends: By name.
    """

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


def paths(choice: Choice, name: str | None = None) -> Iterator[tuple[tuple[Answer, ...], str]]:
    """All ways through the questions: the answers, and the backend that they end at."""
    name = choice.first if name is None else name
    if name in choice.backends:
        yield (), name
        return
    for answer in choice.questions[name].answer:
        for rest, end in paths(choice, answer.go):
            yield (answer, *rest), end


@dataclass(frozen=True, slots=True)
class Need:
    """
    What somebody comes with, and what the page should say to that.

    Attributes:
        story: In their words.
        answers: The ids of the answers they would give.
        backend: The recommendation.
        advice: What comes with it; empty: nothing.
    """

    story: str
    answers: Sequence[str]
    backend: str
    advice: str = ""


NEEDS = (
    Need("threads of one web process fill a cache once", ("twice", "process"), "memory", "efficiency"),
    Need(
        "a cron job of one server must not overlap with itself", ("twice", "machine", "directory"), "file", "efficiency"
    ),
    Need("a desktop tool keeps its data in SQLite", ("store", "machine", "sqlite"), "sqlite", "guard"),
    Need("three servers with Redis have the same crontab", ("twice", "machines", "redis", "no"), "redis", "efficiency"),
    Need("Celery workers with a Redis broker charge cards", ("outside", "machines", "redis", "no"), "redis", "outside"),
    Need("seats are rows in PostgreSQL, sold in one transaction", ("database",), "transaction"),
    Need(
        "pods update a stock in PostgreSQL, with a version in each row",
        ("store", "machines", "postgresql", "nothing"),
        "postgresql",
        "guard",
    ),
    Need(
        "a few workers with PostgreSQL are often killed, and nobody wants to wait for a ttl",
        ("twice", "machines", "postgresql", "connection"),
        "postgresql-advisory",
        "efficiency",
    ),
    Need("a shop on MariaDB, thousands of orders", ("store", "machines", "mysql", "nothing"), "mariadb", "guard"),
    Need("a leader in a cluster that runs ZooKeeper", ("store", "machines", "zookeeper"), "zookeeper", "guard"),
    Need("controllers that have an etcd of their own", ("store", "machines", "etcd"), "etcd", "guard"),
    Need(
        "only Redis, on five independent machines, and locks must survive one of them",
        ("store", "machines", "redis", "yes", "yes"),
        "redlock",
        "guard",
    ),
    Need(
        "only one Redis, but locks must survive its loss",
        ("outside", "machines", "redis", "yes", "no"),
        "etcd",
        "outside",
    ),
    Need("nothing runs yet, and a repeated job is no harm", ("twice", "machines", "none", "no"), "redis", "efficiency"),
)
