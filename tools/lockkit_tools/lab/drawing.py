"""What all drawings share: the axis of time, the numbers of the story, and the words for what is drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from lockkit.units import Instant
from lockkit_tools.lab.record import Lane, Mark, Record, Span, SpanKind, Tone
from lockkit_tools.lab.run import Result, story, token_ranks
from lockkit_tools.lab.scenario import TTL
from lockkit_tools.lab.verdict import Word

LEGEND: Final[dict[SpanKind, str]] = {
    "holds": "has a valid lease",
    "believes": "lease over, client does not know",
    "stopping": "must stop",
    "waits": "waits",
    "kept": "kept for this client",
    "offered": "offered to this client",
    "paused": "paused",
    "cut": "cut off",
    "down": "down",
    "silent": "does not vote yet",
}
"""What each kind of span means, in the order of the legend."""

STEPS: Final = (1.0, 2.0, 5.0)


VERDICTS: Final[dict[Word, Tone]] = {"kept": "good", "contained": "fault", "broken": "bad"}


@dataclass(frozen=True, slots=True)
class Numbered:
    """A line of the story with its number and its time."""

    number: int
    mark: Mark
    when: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """A record, ready to be drawn, with the words around it."""

    title: str
    about: str
    subtitle: str
    headline: str
    tone: Tone  # of the headline
    advice: tuple[str, ...]
    footnote: str
    record: Record
    clients: tuple[str, ...]
    lines: tuple[Numbered, ...]
    messages: tuple[str, ...] = ()  # what each kind of message is, if they are drawn
    axis: tuple[tuple[float, str], ...] = ()  # marks of the axis of time, unless seconds

    @property
    def end(self) -> float:
        """Return when the drawing ends."""
        return self.record.end

    def of(self, lane: Lane) -> list[Numbered]:
        """Give the lines of the story that belong to a lane."""
        return [line for line in self.lines if line.mark.lane == lane.name]

    def spans(self, lane: Lane, *kinds: SpanKind) -> list[Span]:
        """Give the spans of a lane, of some kinds."""
        return [span for span in self.record.spans if span.lane == lane.name and span.kind in kinds]

    def kinds(self) -> list[SpanKind]:
        """Give the kinds of spans that are there, in the order of the legend."""
        present = {span.kind for span in self.record.spans}
        return [kind for kind in LEGEND if kind in present]

    def token(self, span: Span) -> str:
        """Name the token of a span, or nothing."""
        return "" if span.token is None else f"token {token_ranks(self.record)[span.token]}"


def prepare(result: Result, seed: int) -> Drawing:
    """Number the story of a scene, and say what it comes to."""
    scene, verdict, end = result.scene, result.verdict, result.record.end
    return Drawing(
        title=scene.title,
        about=scene.about,
        subtitle=_subtitle(result, seed),
        headline=verdict.headline,
        tone=VERDICTS[verdict.word],
        advice=verdict.advice,
        footnote=f"Code: {result.parts}.",
        record=result.record,
        clients=scene.clients,
        lines=tuple(Numbered(number, mark, at_text(mark.at, end)) for number, mark in enumerate(story(result), 1)),
        messages=("round 1: ask for the lock", "round 2: write the token") if scene.messages else (),
    )


def _subtitle(result: Result, seed: int) -> str:
    """Say on what a scene was played."""
    scene = result.scene
    fenced = "storage compares tokens" if scene.fenced else "storage does not compare tokens"
    words = [str(scene.backends[0]), f"ttl {TTL:g} s", f"seed {seed}"]
    if result.record.writes:
        words.append(fenced)
    return " · ".join(words)


def ticks(end: Instant, most: int) -> list[tuple[float, str]]:
    """Give round times from 0 to the end, at most `most`, each with its text; the last with the unit."""
    unit, name = (0.001, "ms") if end < 1 else (1.0, "s")
    span = end / unit
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(step * power for step in (*STEPS, 10.0) if span / (step * power) <= most)
    count = int(span / step + 1e-9)
    texts = [f"{index * step:g}" for index in range(count + 1)]
    texts[-1] += f" {name}"
    return [(index * step * unit, text) for index, text in enumerate(texts)]


def at_text(at: Instant, end: Instant) -> str:
    """Write a time."""
    return f"{at * 1000:.0f} ms" if end < 1 else f"{at:.1f} s"
