"""Draws scenes with characters: lanes over time, the story, and the verdict."""

from __future__ import annotations

import textwrap
from typing import Final

from lockkit_tools.lab.drawing import LEGEND, Drawing, at_text, prepare, subtitle, ticks
from lockkit_tools.lab.record import Lane, SpanKind, Tone
from lockkit_tools.lab.run import Result, Run

WIDTH_MIN = 40
WIDTH_MAX = 120
"""Wider lines are hard to read."""

_STYLES: Final = {
    "bold": "1", "dim": "2", "good": "1;32", "bad": "1;31", "fault": "33", "notice": "36", "plain": "0",
    "client0": "34", "client1": "35", "client2": "32", "client3": "36", "client4": "33", "client5": "31",
}  # fmt: skip

_GLYPHS: Final[dict[SpanKind, str]] = {
    "waits": "·", "holds": "█", "believes": "▒", "stopping": "▓", "offered": "░", "down": "×", "silent": "~",
}  # fmt: skip

_PLAIN: Final = str.maketrans(
    {
        "█": "#", "▒": "%", "▓": "=", "░": "+", "·": ".", "×": "x", "─": "-", "✓": "v", "✗": "X", "‼": "!", "└": "\\",
        "┘": "/", "│": "|", "…": "~", "—": "-", "→": ">",
    }
)  # fmt: skip
"""What stands for them where the terminal knows only ASCII."""

WORD_COLOURS: Final[dict[str, str]] = {"kept": "good", "contained": "fault", "broken": "bad"}


class _Row:
    """One line of characters, each with a style."""

    def __init__(self, width: int) -> None:
        self.characters = [" "] * width
        self.styles = [""] * width

    def put(self, at: int, text: str, style: str = "") -> None:
        for offset, character in enumerate(text):
            if 0 <= at + offset < len(self.characters):
                self.characters[at + offset] = character
                self.styles[at + offset] = style

    def is_free(self, start: int, end: int) -> bool:
        return all(character == " " for character in self.characters[max(start, 0) : end])

    def text(self, *, colour: bool) -> str:
        parts: list[str] = []
        current = ""
        last = len("".join(self.characters).rstrip())
        for character, style in zip(self.characters[:last], self.styles[:last], strict=True):
            if colour and style != current:
                parts.append(_code(style))
                current = style
            parts.append(character)
        return "".join(parts) + (_code("") if current else "")


def _code(style: str) -> str:
    return f"\033[0;{_STYLES[style]}m" if style else "\033[0m"


def draw(run: Run, *, width: int = 80, colour: bool = False, ascii_only: bool = False) -> str:
    """Draw all scenes of a scenario."""
    width = max(WIDTH_MIN, min(width, WIDTH_MAX))
    paint = _Painter(width, colour=colour)
    lines: list[str] = []
    if len(run.results) > 1:
        lines += [paint.styled(run.scenario.title, "bold"), *paint.wrapped(run.scenario.about, "dim"), ""]
    for index, result in enumerate(run.results):
        if index:
            lines += ["", paint.styled("─" * width, "dim"), ""]
        lines += paint.scene(result, run.seed)
    text = "\n".join(lines) + "\n"
    return text.translate(_PLAIN) if ascii_only else text


class _Painter:
    """Draws one scene after the other in a width."""

    def __init__(self, width: int, *, colour: bool) -> None:
        self._width = width
        self._colour = colour

    def styled(self, text: str, style: str) -> str:
        return f"{_code(style)}{text}{_code('')}" if self._colour and style else text

    def wrapped(self, text: str, style: str = "", first: str = "", rest: str = "") -> list[str]:
        lines = textwrap.wrap(text, self._width, initial_indent=first, subsequent_indent=rest)
        return [self.styled(line, style) for line in lines]

    def scene(self, result: Result, seed: int) -> list[str]:
        drawing = prepare(result)
        return [
            *self.wrapped(result.scene.title, "bold"),
            *self.wrapped(result.scene.about),
            *self.wrapped(subtitle(result, seed), "dim"),
            "",
            *self._chart(drawing),
            *self._legend(drawing),
            "",
            *self._story(drawing),
            "",
            *self._verdict(result),
        ]

    # -- lanes ---------------------------------------------------------------------------------------------------------

    def _chart(self, drawing: Drawing) -> list[str]:
        left = max(len(lane.label) for lane in drawing.result.record.lanes) + 1
        space = self._width - left
        clients = {name: f"client{index}" for index, name in enumerate(drawing.result.scene.clients)}
        lines = []
        for lane in drawing.result.record.lanes:
            chart = _LaneChart(drawing, lane, space, clients)
            rows = [chart.numbers(), chart.bar(), chart.faults()]
            for index, row in enumerate(rows):
                if row is not None:
                    label = lane.label.ljust(left) if index == 1 else " " * left
                    style = clients.get(lane.name, "bold") if index == 1 else ""
                    lines.append((self.styled(label, style) + row.text(colour=self._colour)).rstrip())
            if lane.name == drawing.result.scene.clients[-1] and drawing.result.record.overlaps:
                lines.append(" " * left + self._overlaps(drawing, space).text(colour=self._colour))
        axis = _Row(space)
        for at, text in ticks(drawing.end, max(3, space // 9)):
            column = round(at / drawing.end * (space - 1))
            axis.put(min(column, space - len(text)), text, "dim")
        return [*lines, " " * left + axis.text(colour=self._colour)]

    def _overlaps(self, drawing: Drawing, space: int) -> _Row:
        row = _Row(space)
        for overlap in drawing.result.record.overlaps:
            first, last = (round(at / drawing.end * (space - 1)) for at in (overlap.start, overlap.end))
            text = " two holders " if last - first > 16 else ""
            row.put(first, text.center(max(1, last - first), "!"), "bad")
        return row

    def _legend(self, drawing: Drawing) -> list[str]:
        words = [f"{_GLYPHS[kind]} {LEGEND[kind]}" for kind in drawing.kinds() if kind in _GLYPHS and kind != "offered"]
        if "kept" in drawing.kinds():
            words.append(f"{drawing.result.scene.clients[0]} the server keeps the lock for that client")
        if drawing.result.record.writes:
            words.append("✓ write accepted  ✗ refused  ‼ replaced a newer one")
        lines, line = [], ""
        for word in words:
            if line and len(line) + 3 + len(word) > self._width:
                lines.append(line)
                line = ""
            line = f"{line}   {word}" if line else word
        return [self.styled(one[: self._width], "dim") for one in [*lines, line] if one]

    # -- words ---------------------------------------------------------------------------------------------------------

    def _story(self, drawing: Drawing) -> list[str]:
        lines = []
        last = len(at_text(drawing.end, drawing.end))
        for line in drawing.lines:
            tone: Tone = line.mark.tone
            head = f"{line.number:>3}  {at_text(line.mark.at, drawing.end):>{last}}  "
            style = "" if tone == "plain" else tone
            lines += self.wrapped(line.mark.text, style, head, " " * len(head))
        return lines

    def _verdict(self, result: Result) -> list[str]:
        verdict = result.verdict
        lines = self.wrapped(verdict.headline, WORD_COLOURS[verdict.word])
        for promise in verdict.promises:
            if promise.state != "none":
                sign, style = ("✓", "good") if promise.state == "held" else ("✗", "bad")
                first, *rest = textwrap.wrap(f"{promise.text}: {promise.why}.", self._width - 4)
                lines.append(f"  {self.styled(sign, style)} {first}")
                lines += [f"    {line}" for line in rest]
        for advice in verdict.advice:
            lines += self.wrapped(advice, "", "  → ", "    ")
        lines += self.wrapped(f"Code: {result.parts}.", "dim")
        return lines


class _LaneChart:
    """The rows of one lane."""

    def __init__(self, drawing: Drawing, lane: Lane, space: int, clients: dict[str, str]) -> None:
        self._drawing = drawing
        self._lane = lane
        self._space = space
        self._clients = clients

    def _column(self, at: float) -> int:
        return max(0, min(self._space - 1, round(at / self._drawing.end * (self._space - 1))))

    def numbers(self) -> _Row | None:
        """Above the bar: the lines of the story."""
        lines = self._drawing.of(self._lane)
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
            row.put(column, text, "" if line.mark.tone == "plain" else line.mark.tone)
        return row

    def bar(self) -> _Row:
        """The state over time."""
        row = _Row(self._space)
        row.put(0, "─" * self._space, "dim")
        if self._lane.kind == "client":
            self._client_bar(row)
        elif self._lane.kind == "server":
            self._server_bar(row)
        else:
            for write in self._drawing.result.record.writes:
                glyph, style = ("✗", "good") if not write.accepted else ("‼", "bad") if write.overwrote else ("✓", "")
                row.put(self._column(write.at), glyph, style or ("bad" if write.late else ""))
        return row

    def _client_bar(self, row: _Row) -> None:
        died = self._drawing.result.record.dead.get(self._lane.name)
        if died is not None:
            row.put(self._column(died), " " * self._space)
            row.put(self._column(died), "×", "bad")
        for kind in ("waits", "holds", "believes", "stopping"):
            for span in self._drawing.spans(self._lane, kind):
                start, end = self._column(span.start), self._column(span.end)
                style = "bad" if kind == "believes" else self._clients[self._lane.name]
                row.put(start, _GLYPHS[kind] * max(1, end - start), style)
                token = f" {self._drawing.token(span)} "
                if kind == "holds" and span.token is not None and end - start > len(token) + 2:
                    row.put(start + 1, token, style)

    def _server_bar(self, row: _Row) -> None:
        for kind in ("silent", "kept", "offered", "down"):
            for span in self._drawing.spans(self._lane, kind):
                start, end = self._column(span.start), self._column(span.end)
                glyph = span.who[:1] if kind in {"kept", "offered"} else _GLYPHS[kind]
                glyph = glyph.lower() if kind == "offered" else glyph
                style = self._clients.get(span.who, "fault" if kind == "silent" else "bad")
                row.put(start, glyph * max(1, end - start), style)

    def faults(self) -> _Row | None:
        """Below the bar: from when to when it is paused or cut off."""
        spans = self._drawing.spans(self._lane, "paused", "cut")
        if not spans:
            return None
        row = _Row(self._space)
        for span in spans:
            start, end = self._column(span.start), self._column(span.end)
            text = LEGEND[span.kind]
            if span.note and end - start > len(span.note) + 2:
                text = span.note
            line = f"└{text.center(max(0, end - start - 1), '─')}┘"
            row.put(start, line if end - start > len(text) + 2 else f"└{text}", "fault")
        return row
