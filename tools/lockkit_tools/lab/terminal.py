"""Draws scenes with characters: lanes over time, the story, and the verdict."""

from __future__ import annotations

import textwrap
from typing import Final

from rich.text import Text

from lockkit.units import Instant
from lockkit_tools.lab.drawing import LEGEND, Drawing, prepare, ticks
from lockkit_tools.lab.record import Lane, Span, SpanKind
from lockkit_tools.lab.run import Result, Run

WIDTH_MIN = 40
WIDTH_MAX = 120
"""Wider lines are hard to read."""

_STYLES: Final = {
    "good": "bold green", "bad": "bold red", "fault": "yellow", "notice": "cyan", "plain": "",
    "kept": "bold green", "contained": "yellow", "broken": "bold red",
}  # fmt: skip
"""Of tones of the story, and of verdicts."""

_CLIENTS: Final = ("blue", "magenta", "green", "cyan", "yellow", "red")

_GLYPHS: Final[dict[SpanKind, str]] = {
    "waits": "·", "holds": "█", "believes": "▒", "stopping": "▓", "offered": "░", "down": "×", "silent": "~",
}  # fmt: skip

_PLAIN: Final = str.maketrans("█▒▓░·×─✓✗‼└┘│…—→", "#%=+.x-vX!\\/|~->")
"""What stands for them where the terminal knows only ASCII."""


def draw(run: Run, *, width: int = 80, ascii_only: bool = False) -> Text:
    """Draw all scenes of a scenario."""
    width = max(WIDTH_MIN, min(width, WIDTH_MAX))
    lines: list[Text] = []
    if len(run.results) > 1:
        lines += [Text(run.scenario.title, "bold"), *_wrapped(run.scenario.about, width, "dim"), Text()]
    for index, result in enumerate(run.results):
        if index:
            lines += [Text(), Text("─" * width, "dim"), Text()]
        lines += _scene(result, run.seed, width)
    for line in lines:
        line.rstrip()
    text = Text("\n").join(lines)
    if ascii_only:
        text.plain = text.plain.translate(_PLAIN)
    return text


def _wrapped(text: str, width: int, style: str = "", first: str = "", rest: str = "") -> list[Text]:
    return [Text(one, style) for one in textwrap.wrap(text, width, initial_indent=first, subsequent_indent=rest)]


def _scene(result: Result, seed: int, width: int) -> list[Text]:
    drawing = prepare(result, seed)
    return [
        *_wrapped(drawing.title, width, "bold"),
        *_wrapped(drawing.about, width),
        *_wrapped(drawing.subtitle, width, "dim"),
        Text(),
        *_Chart(drawing, width).lines(),
        *_legend(drawing, width),
        Text(),
        *_story(drawing, width),
        Text(),
        *_verdict(result, width),
    ]


# -- lanes -------------------------------------------------------------------------------------------------------------


class _Row:
    """One line of characters, each with a style."""

    def __init__(self, width: int) -> None:
        self.text = Text(" " * width)

    def put(self, at: int, text: str, style: str = "") -> None:
        text = text[: max(0, len(self.text) - at)]
        self.text = Text.assemble(self.text[:at], (text, style), self.text[at + len(text) :])

    def is_free(self, start: int, end: int) -> bool:
        return not self.text.plain[max(start, 0) : end].strip()


class _Chart:
    """The lanes of a scene over time."""

    def __init__(self, drawing: Drawing, width: int) -> None:
        self._drawing = drawing
        self._record = drawing.record
        self._left = max(len(lane.label) for lane in self._record.lanes) + 1
        self._space = width - self._left
        self._clients = dict(zip(drawing.clients, _CLIENTS, strict=False))

    def lines(self) -> list[Text]:
        """Draw each lane, those of two holders below the clients, and the axis."""
        lines, margin = [], Text(" " * self._left)
        for lane in self._record.lanes:
            label = Text(lane.label.ljust(self._left), self._clients.get(lane.name, "bold"))
            rows = (self._numbers(lane), self._bar(lane), self._faults(lane))
            for head, row in zip((margin, label, margin), rows, strict=True):
                if row is not None:
                    lines.append(Text.assemble(head, row.text))
            if lane.name == self._drawing.clients[-1] and self._record.overlaps:
                lines.append(Text.assemble(margin, self._overlaps().text))
        axis = _Row(self._space)
        for at, text in ticks(self._drawing.end, max(3, self._space // 9)):
            axis.put(min(self._column(at), self._space - len(text)), text, "dim")
        return [*lines, Text.assemble(margin, axis.text)]

    def _column(self, at: Instant) -> int:
        return max(0, min(self._space - 1, round(at / self._drawing.end * (self._space - 1))))

    def _columns(self, span: Span) -> tuple[int, int]:
        return self._column(span.start), self._column(span.end)

    def _overlaps(self) -> _Row:
        row = _Row(self._space)
        for overlap in self._record.overlaps:
            first, last = self._column(overlap.start), self._column(overlap.end)
            text = " two holders " if last - first > 16 else ""
            row.put(first, text.center(max(1, last - first), "!"), "bold red")
        return row

    def _numbers(self, lane: Lane) -> _Row | None:
        """Above the bar: the lines of the story."""
        lines = self._drawing.of(lane)
        if not lines:
            return None
        row = _Row(self._space)
        for line in lines:
            text = str(line.number)
            column = min(self._column(line.mark.at), self._space - len(text))
            while not row.is_free(column - 1, column + len(text) + 1) and column + len(text) < self._space:
                column += 1
            while not row.is_free(column, column + len(text)) and column > 0:
                column -= 1
            row.put(column, text, _STYLES[line.mark.tone])
        return row

    def _bar(self, lane: Lane) -> _Row:
        """The state over time."""
        row = _Row(self._space)
        row.put(0, "─" * self._space, "dim")
        if lane.kind == "client":
            self._client_bar(lane, row)
        elif lane.kind == "server":
            self._server_bar(lane, row)
        else:
            for write in self._record.writes:
                glyph, tone = ("✗", "good") if not write.accepted else ("‼", "bad") if write.overwrote else ("✓", "")
                row.put(self._column(write.at), glyph, _STYLES[tone or ("bad" if write.late else "plain")])
        return row

    def _client_bar(self, lane: Lane, row: _Row) -> None:
        died = self._record.dead.get(lane.name)
        if died is not None:
            row.put(self._column(died), "×".ljust(self._space), "bold red")
        for kind in ("waits", "holds", "believes", "stopping"):
            for span in self._drawing.spans(lane, kind):
                start, end = self._columns(span)
                style = "bold red" if kind == "believes" else self._clients[lane.name]
                row.put(start, _GLYPHS[kind] * max(1, end - start), style)
                token = f" {self._drawing.token(span)} "
                if kind == "holds" and span.token is not None and end - start > len(token) + 2:
                    row.put(start + 1, token, style)

    def _server_bar(self, lane: Lane, row: _Row) -> None:
        for kind in ("silent", "kept", "offered", "down"):
            for span in self._drawing.spans(lane, kind):
                start, end = self._columns(span)
                glyph = span.who[:1] if kind in {"kept", "offered"} else _GLYPHS[kind]
                glyph = glyph.lower() if kind == "offered" else glyph
                style = self._clients.get(span.who, "yellow" if kind == "silent" else "bold red")
                row.put(start, glyph * max(1, end - start), style)

    def _faults(self, lane: Lane) -> _Row | None:
        """Below the bar: from when to when it is paused or cut off."""
        spans = self._drawing.spans(lane, "paused", "cut")
        if not spans:
            return None
        row = _Row(self._space)
        for span in spans:
            start, end = self._columns(span)
            text = span.note if span.note and end - start > len(span.note) + 2 else LEGEND[span.kind]
            line = f"└{text.center(max(0, end - start - 1), '─')}┘"
            row.put(start, line if end - start > len(text) + 2 else f"└{text}", "yellow")
        return row


# -- words -------------------------------------------------------------------------------------------------------------


def _legend(drawing: Drawing, width: int) -> list[Text]:
    words = [f"{_GLYPHS[kind]} {LEGEND[kind]}" for kind in drawing.kinds() if kind in _GLYPHS and kind != "offered"]
    if "kept" in drawing.kinds():
        words.append(f"{drawing.clients[0]} the server keeps the lock for that client")
    if drawing.record.writes:
        words.append("✓ write accepted  ✗ refused  ‼ replaced a newer one")
    lines = [""]
    for word in words:
        longer = f"{lines[-1]}   {word}" if lines[-1] else word
        if len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return [Text(line[:width], "dim") for line in lines if line]


def _story(drawing: Drawing, width: int) -> list[Text]:
    lines = []
    last = max((len(line.when) for line in drawing.lines), default=0)
    for line in drawing.lines:
        head = f"{line.number:>3}  {line.when:>{last}}  "
        lines += _wrapped(line.mark.text, width, _STYLES[line.mark.tone], head, " " * len(head))
    return lines


def _verdict(result: Result, width: int) -> list[Text]:
    verdict = result.verdict
    lines = _wrapped(verdict.headline, width, _STYLES[verdict.word])
    for promise in verdict.promises:
        if promise.state != "none":
            sign, tone = ("✓", "good") if promise.state == "held" else ("✗", "bad")
            promised = _wrapped(f"{promise.text}: {promise.why}.", width, "", f"  {sign} ", "    ")
            promised[0].stylize(_STYLES[tone], 2, 3)
            lines += promised
    for advice in verdict.advice:
        lines += _wrapped(advice, width, "", "  → ", "    ")
    return [*lines, *_wrapped(f"Code: {result.parts}.", width, "dim")]
