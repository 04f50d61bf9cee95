"""
Draws scenes as SVG: one self-contained file, in light and dark, readable on a phone of 360 px.

Lanes over time, with the numbers of the story above them. Everything is in units of a picture 400 wide, so text of size
12 has 11 px on a phone. Colours come from the style sheet in the file, which follows ``prefers-color-scheme``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape

from lockkit.units import Instant
from lockkit_tools.lab.drawing import LEGEND, Drawing, Numbered, prepare, ticks
from lockkit_tools.lab.record import Lane, Message, Span
from lockkit_tools.lab.run import Run

WIDTH = 400
MARGIN = 12
LEFT = 62
"""Where time 0 is: beside the names of the lanes."""
RIGHT = WIDTH - MARGIN - 2

_CLIENTS: Final = (
    ("#1a66c9", "#6cb0ff"), ("#b4530a", "#ffab57"), ("#0a7a52", "#4fd6a2"), ("#7a3fc4", "#c9a0ff"),
    ("#8a6d00", "#e6c94a"), ("#0b7285", "#66d9e8"),
)  # fmt: skip
"""Of each client, on light and on dark ground."""

_ROLES: Final = {
    "ground": ("#ffffff", "#12161d"),
    "ink": ("#1c2430", "#e8edf4"),
    "dim": ("#5b6675", "#a3afbf"),
    "line": ("#c9d1db", "#3a4452"),
    "bad": ("#c8142f", "#ff7b86"),
    "good": ("#0b7a3b", "#4fd08a"),
    "fault": ("#8a5a00", "#f0bf5a"),
    "shade": ("#eef1f5", "#1e252f"),
    "inside": ("#ffffff", "#0b1017"),
    "round1": ("#1a66c9", "#6cb0ff"),
    "round2": ("#b4530a", "#ffab57"),
}


def _style(used: str = "") -> str:
    """Write the colours for light and dark: all, or those that a picture uses."""
    every = [*_ROLES.items(), *((f"client{index}", pair) for index, pair in enumerate(_CLIENTS))]
    both = [(name, pair) for name, pair in every if not used or f"(--{name})" in used]
    light = "".join(f"--{name}:{pair[0]};" for name, pair in both)
    dark = "".join(f"--{name}:{pair[1]};" for name, pair in both)
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


COLOURS: Final = _style()
"""The style sheet with the colours, for light and dark."""

_SHAPES: Final = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;fill:var(--ink)}"
    ".title{font-size:16px;font-weight:700}.small{font-size:11px}.dim{fill:var(--dim)}.strong{font-weight:700}"
    ".inside{fill:var(--inside);font-size:11px;font-weight:600}.bad{fill:var(--bad)}.good{fill:var(--good)}"
    ".fault{fill:var(--fault)}.number{font-size:10px;font-weight:700;text-anchor:middle;fill:var(--ground)}"
    ".thin{stroke:var(--line);stroke-width:1;fill:none}.none{fill:none}"
)


class _Canvas:
    """Collects elements, and how far down they reach."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.labels: list[str] = []
        self.y = 0.0

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "") -> None:
        attributes = (f' class="{style}"' if style else "") + (f' text-anchor="{anchor}"' if anchor else "")
        self.parts.append(f'<text x="{_n(x)}" y="{_n(y)}"{attributes}>{escape(text)}</text>')

    def label(self, x: float, y: float, text: str, style: str = "", anchor: str = "") -> None:
        """Write a text that stands above everything that is drawn later."""
        self.text(x, y, text, style, anchor)
        self.labels.append(self.parts.pop())

    def flush(self) -> None:
        """Put the labels on top."""
        self.parts += self.labels
        self.labels = []

    def paragraph(self, text: str, size: float, style: str = "", *, x: float = MARGIN) -> None:
        # Bold text is wider.
        room = (WIDTH - MARGIN - x) / (1.12 if "strong" in style or "title" in style else 1.0)
        for line in wrap(text, room, size):
            self.y += size + 4
            self.text(x, self.y, line, style)

    def rect(self, x: float, y: float, width: float, height: float, paint: str, *, extra: str = "") -> None:
        self.parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 1.5))}" height="{_n(height)}" fill="{paint}"{extra}/>'
        )

    def circle(self, x: float, y: float, radius: float, paint: str) -> None:
        self.parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{paint}"/>')

    def plate(self, x: float, y: float, text: str, *, room: float, style: str = "small strong") -> None:
        """Write a text on a plate, over a pattern."""
        width = text_width(text, 12)
        if text and width < room - 4:
            self.rect(x - width / 2 - 3, y - 8, width + 6, 15, "var(--ground)", extra=' rx="3"')
            self.labels.append(self.parts.pop())
            self.label(x, y + 4, text, style, "middle")

    def number(self, x: float, y: float, line: Numbered) -> None:
        tone = line.mark.tone
        self.circle(x, y, 7.5, f"var(--{tone if tone in {'bad', 'good', 'fault'} else 'dim'})")
        self.text(x, y + 3.6, str(line.number), "number")

    def line(self, start: tuple[float, float], end: tuple[float, float], paint: str, extra: str = "") -> None:
        self.parts.append(
            f'<line x1="{_n(start[0])}" y1="{_n(start[1])}" x2="{_n(end[0])}" y2="{_n(end[1])}" '
            f'stroke="{paint}"{extra}/>'
        )


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


_WIDTHS: Final = {
    character: width
    for characters, width in (
        ("ijlI'|", 0.29), (" .,:;·", 0.33), ("-()[]!ft", 0.39), ("rs", 0.47), ("ckvxyz", 0.58),
        ("abdeghnopqu?=_", 0.635), ("w", 0.82), ("mMW@%", 0.98), ("ABCDEFGHJKLNOPQRSTUVXYZ→✓", 0.74),
    )
    for character in characters
}  # fmt: skip
"""Of DejaVu Sans, the widest of the usual fonts, in parts of the size: what fits in it fits in all."""


def text_width(text: str, size: float) -> float:
    """Estimate how wide a text is, a little too wide rather than too narrow."""
    return sum(_WIDTHS.get(character, 0.64) for character in text) * size


def wrap(text: str, width: float, size: float) -> list[str]:
    """Break a text into lines that fit."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        longer = f"{line} {word}" if line else word
        if line and text_width(longer, size) > width:
            lines.append(line)
            line = word
        else:
            line = longer
    return [*lines, line] if line else lines


def draw(run: Run) -> str:
    """Draw all scenes of a scenario with their stories and verdicts, one below the other."""
    return picture(title(run), [prepare(result, run.seed) for result in run.results])


def picture(title: str, drawings: Sequence[Drawing]) -> str:
    """Draw one below the other."""
    parts: list[str] = []
    y = 0.0
    for index, drawing in enumerate(drawings):
        canvas = _Canvas()
        if index:
            canvas.line((MARGIN, 2), (WIDTH - MARGIN, 2), "var(--line)")
        _scene(canvas, drawing)
        parts.append(f'<g transform="translate(0 {_n(y)})">{"".join(canvas.parts)}</g>')
        y += canvas.y + MARGIN
    return _document(title, _description(drawings), "".join(parts), y)


def title(run: Run) -> str:
    """Name a picture: after its scene if it has one only."""
    return run.scenario.title if len(run.results) > 1 else run.results[0].scene.title


_PATTERNS: Final = {
    name: f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="6" height="6" fill="var(--{ground})"/>'
    f'<rect width="{width}" height="6" fill="var(--{ink})"/></pattern>'
    for name, ground, width, ink in (("hatch", "ground", 3, "bad"), ("rest", "shade", 2, "fault"))
}


def _document(title: str, description: str, body: str, height: float) -> str:
    patterns = "".join(pattern for name, pattern in _PATTERNS.items() if f"(#{name})" in body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_n(height)}" role="img" '
        'aria-labelledby="lab-title lab-desc">'
        f'<title id="lab-title">{escape(title)}</title><desc id="lab-desc">{escape(description)}</desc>'
        f"<style>{_style(patterns + body + _SHAPES)}{_SHAPES}</style>{patterns and f'<defs>{patterns}</defs>'}"
        f'<rect width="{WIDTH}" height="{_n(height)}" rx="8" fill="var(--ground)"/>{body}</svg>\n'
    )


def _description(drawings: Sequence[Drawing]) -> str:
    words = []
    for drawing in drawings:
        words.append(f"{drawing.title}. {drawing.headline}")
        words += [line.mark.text for line in drawing.lines]
    return " ".join(words)


def _scene(canvas: _Canvas, drawing: Drawing) -> None:
    canvas.y = 8
    canvas.paragraph(drawing.title, 16, "title")
    canvas.y += 2
    canvas.paragraph(drawing.about, 12, "dim")
    canvas.y += 2
    canvas.paragraph(drawing.subtitle, 11, "small dim")
    canvas.y += 8
    _Chart(canvas, drawing).draw()
    _legend(canvas, drawing)
    canvas.y += 8
    _story(canvas, drawing)
    canvas.y += 8
    _verdict(canvas, drawing)


# -- lanes ------------------------------------------------------------------------------------------------------------


class _Place:
    """Where a lane is."""

    def __init__(self, lane: Lane, bar: float, height: float) -> None:
        self.lane = lane
        self.bar = bar
        self.height = height

    @property
    def middle(self) -> float:
        return self.bar + self.height / 2

    @property
    def end(self) -> float:
        return self.bar + self.height


class _Chart:
    """The lanes of a scene."""

    def __init__(self, canvas: _Canvas, drawing: Drawing) -> None:
        self._canvas = canvas
        self._drawing = drawing
        self._record = drawing.record
        self._paints = {name: f"var(--client{index})" for index, name in enumerate(drawing.clients)}
        self._places: dict[str, _Place] = {}

    def draw(self) -> None:
        canvas, drawing = self._canvas, self._drawing
        top = y = canvas.y
        dense = sum(lane.kind == "server" for lane in self._record.lanes) > 3
        for lane in self._record.lanes:
            y += 19 if drawing.of(lane) else 6
            height = 20 if lane.kind == "client" else 10 if dense and lane.kind == "server" else 14
            self._places[lane.name] = _Place(lane, y, height)
            y += height + (15 if drawing.spans(lane, "paused", "cut") else 5)
        for at, text in drawing.axis or ticks(drawing.end, 7):
            x = self._x(at)
            canvas.line((x, top + 4), (x, y + 2), "var(--line)", ' stroke-dasharray="1 3"')
            last = x > RIGHT - 16
            canvas.text(RIGHT + 2 if last else x, y + 14, text, "small dim", "end" if last else "middle")
        for place in self._places.values():
            self._lane(place)
        for message in self._record.messages:
            if message.sent < drawing.end and message.kind == "write":
                self._write(message)
            elif message.sent < drawing.end and drawing.messages:
                self._protocol(message)
        self._overlaps()
        canvas.flush()
        for place in self._places.values():
            self._numbers(place)
        canvas.y = y + 16

    def _x(self, at: Instant) -> float:
        return LEFT + (RIGHT - LEFT) * min(at, self._drawing.end) / self._drawing.end

    def _lane(self, place: _Place) -> None:
        canvas, lane = self._canvas, place.lane
        canvas.text(MARGIN, place.middle + 4, lane.label, "strong" if lane.kind == "client" else "small")
        x = self._x(self._record.dead.get(lane.name, self._drawing.end))
        canvas.line((LEFT, place.middle), (x, place.middle), "var(--line)", ' stroke-width="1.5"')
        if lane.kind == "client":
            self._client(place)
            if lane.name in self._record.dead:
                canvas.circle(x, place.middle, 8, "var(--ground)")
                canvas.text(x, place.middle + 5, "✕", "strong bad", "middle")
        elif lane.kind == "server":
            self._server(place)
        for span in self._drawing.spans(lane, "paused", "cut"):
            start, end, y = self._x(span.start), self._x(span.end), place.end + 4
            canvas.line((start, y), (end, y), "var(--fault)", ' stroke-width="3"')
            text = span.note if span.note and start + text_width(span.note, 12) < RIGHT else LEGEND[span.kind]
            canvas.label(min(start, RIGHT - 40), y + 12, text, "small strong fault")

    def _client(self, place: _Place) -> None:
        canvas, drawing, paint = self._canvas, self._drawing, self._paints[place.lane.name]
        for span in drawing.spans(place.lane, "waits"):
            start, end = self._x(span.start), self._x(span.end)
            canvas.line((start, place.middle), (end, place.middle), paint, ' stroke-width="3" stroke-dasharray="2 4"')
            if end - start > 40:
                canvas.label((start + end) / 2, place.middle - 5, "waits", "small dim", "middle")
        for span in drawing.spans(place.lane, "holds"):
            token = drawing.token(span)
            labels = (" · ".join(filter(None, [word, token])) for word in ("holds the lock", "holds", ""))
            self._bar(place, span, paint, [*labels, "holds"])
        for span in drawing.spans(place.lane, "stopping"):
            self._box(place, span, "url(#rest)", f' stroke="{paint}" stroke-width="1.5"', "grace")
        for span in drawing.spans(place.lane, "believes"):
            width = self._x(span.end) - self._x(span.start)
            text = next((one for one in ("thinks it holds the lock", "thinks it holds") if _fits(one, width - 12)), "")
            self._box(place, span, "url(#hatch)", ' stroke="var(--bad)" stroke-width="1.5"', text)

    def _server(self, place: _Place) -> None:
        canvas = self._canvas
        for span in self._drawing.spans(place.lane, "silent"):
            self._box(place, span, "url(#rest)", ' stroke="var(--fault)"', "does not vote yet")
        for span in self._drawing.spans(place.lane, "kept", "offered"):
            kept = span.kind == "kept"
            paint, labels = self._paints.get(span.who, "var(--client0)"), (f"lock of {span.who}", span.who)
            self._bar(place, span, paint, labels if kept else (), opacity=0.35 if kept else 0.15)
            if place.height < 12 and self._x(span.end) - self._x(span.start) > 24:
                canvas.label(self._x(span.end) - 4, place.middle + 4, span.who, "small strong", "end")
        for span in self._drawing.spans(place.lane, "down"):
            self._box(place, span, "var(--ground)", ' stroke="var(--bad)" stroke-dasharray="3 2"', "")
            middle = (self._x(span.start) + self._x(span.end)) / 2
            if _fits("down", self._x(span.end) - self._x(span.start) - 4):
                canvas.text(middle, place.middle + 4, "down", "small strong bad", "middle")

    def _box(self, place: _Place, span: Span, paint: str, extra: str, text: str) -> None:
        """Draw a span with a pattern, and a text on a plate over it."""
        start = self._x(span.start)
        width = self._x(span.end) - start
        self._canvas.rect(start, place.bar, width, place.height, paint, extra=extra)
        self._canvas.plate(start + width / 2, place.middle, text, room=width)

    def _bar(self, place: _Place, span: Span, paint: str, labels: Sequence[str], opacity: float = 1.0) -> None:
        start = self._x(span.start)
        width = self._x(span.end) - start
        self._canvas.rect(start, place.bar, width, place.height, "var(--ground)", extra=' rx="3"')
        extra = ' rx="3"' + (f' fill-opacity="{opacity}"' if opacity < 1 else "")
        self._canvas.rect(start, place.bar, width, place.height, paint, extra=extra)
        text = next((one for one in labels if _fits(one, width - 8)), "")
        if text and place.height >= 12:
            self._canvas.label(start + 5, place.middle + 4, text, "inside" if opacity == 1 else "small")

    def _overlaps(self) -> None:
        """Frame the times at which two clients hold the lock."""
        for overlap in self._record.overlaps:
            upper, lower = sorted((self._places[overlap.older], self._places[overlap.newer]), key=lambda one: one.bar)
            x, top = self._x(overlap.start), upper.bar - 3
            width, height = self._x(overlap.end) - x, lower.end + 3 - top
            extra = ' fill-opacity="0.13" stroke="var(--bad)" stroke-width="1.5" stroke-dasharray="4 2" rx="3"'
            self._canvas.rect(x, top, width, height, "var(--bad)", extra=extra)
            wide = text_width("two holders", 12)
            # Beside the number of the newer grant and those that follow, inside the frame if it is wide enough.
            last = x
            for at in sorted(line.mark.at for line in self._drawing.of(lower.lane)):
                last = max(last, self._x(at)) if self._x(at) - last < wide + 22 else last
            left = last + 11 if last - x + wide + 22 < width else x + width + 10
            if left + wide < WIDTH - 4:
                middle = left + wide / 2
                self._canvas.plate(middle, lower.bar - 10, "two holders", room=2 * wide, style="small strong bad")

    def _write(self, message: Message) -> None:
        source, target = self._places[message.source], self._places[message.target]
        arrives = self._drawing.end if message.arrives is None else message.arrives
        start, end = (self._x(message.sent), source.end), (self._x(arrives), target.middle)
        sign, style = {"refused": ("✕", "good"), "overwrote": ("!", "bad")}.get(message.fate, ("✓", "ink"))
        self._canvas.line(start, end, "var(--ground)", ' stroke-width="4.5"')
        self._canvas.line(start, end, f"var(--{style})", ' stroke-width="1.8"')
        self._canvas.circle(*end, 7.5, f"var(--{style})")
        self._canvas.text(end[0], end[1] + 4, sign, "number")

    def _protocol(self, message: Message) -> None:
        if message.arrives is None:
            return
        source, target = self._places[message.source], self._places[message.target]
        down = source.bar < target.bar
        start = (self._x(message.sent), source.end if down else source.bar)
        end = (self._x(message.arrives), target.bar if down else target.end)
        paint = "var(--round2)" if message.kind == "fence" else "var(--round1)"
        self._canvas.line(start, end, paint, ' stroke-width="1.4"' + ("" if down else ' stroke-dasharray="3 2"'))
        self._canvas.circle(*end, 2.2, paint)

    def _numbers(self, place: _Place) -> None:
        taken: list[float] = []
        for line in self._drawing.of(place.lane):
            taken.append(_free_place(self._x(line.mark.at), taken))
            self._canvas.number(taken[-1], place.bar - 10, line)


def _fits(text: str, width: float) -> bool:
    return bool(text) and text_width(text, 11) <= width


def _free_place(x: float, taken: list[float]) -> float:
    """Move a number to the right of those that are there, or to the left at the edge."""
    x = max(x, LEFT - 2)
    while any(abs(x - other) < 16 for other in taken):
        x += 1
    if x > RIGHT - 2:
        x = RIGHT - 2
        while any(abs(x - other) < 16 for other in taken) and x > LEFT:
            x -= 1
    return x


# -- words ------------------------------------------------------------------------------------------------------------


def _legend(canvas: _Canvas, drawing: Drawing) -> None:
    words = []
    if drawing.messages:
        words += [(f"var(--round{number})", text) for number, text in enumerate(drawing.messages, 1)]
    if "believes" in drawing.kinds():
        words.append(("url(#hatch)", LEGEND["believes"]))
    if "silent" in drawing.kinds():
        words.append(("url(#rest)", LEGEND["silent"]))
    if "kept" in drawing.kinds() and not drawing.messages:
        words.append(("var(--client0)", "pale: the server keeps the lock for that client"))
    x, y = float(MARGIN), canvas.y + 14
    for paint, text in words:
        width = 18 + text_width(text, 11) + 10
        if x > MARGIN and x + width > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 15
        pale = ' fill-opacity="0.35"' if text.startswith("pale") else ""
        canvas.rect(x, y - 9, 12, 10, paint, extra=pale + ' rx="2"')
        canvas.text(x + 17, y, text.removeprefix("pale: "), "small dim")
        x += width
    if words:
        canvas.y = y


def _story(canvas: _Canvas, drawing: Drawing) -> None:
    for line in drawing.lines:
        tone = line.mark.tone
        style = {"bad": "bad strong", "good": "good strong", "fault": "fault"}.get(tone, "")
        y = canvas.y + 16
        canvas.number(MARGIN + 8, y - 4, line)
        if line.when:
            canvas.text(MARGIN + 63, y, line.when, "small dim", "end")
        canvas.paragraph(line.mark.text, 12, style, x=MARGIN + 69)
        canvas.y += 1


def _verdict(canvas: _Canvas, drawing: Drawing) -> None:
    lines = wrap(drawing.headline, WIDTH - 2 * MARGIN - 20, 14.5)
    height = 12 + 17 * len(lines)
    canvas.rect(MARGIN, canvas.y, WIDTH - 2 * MARGIN, height, f"var(--{drawing.tone})", extra=' rx="5"')
    for line in lines:
        canvas.y += 17
        canvas.parts.append(
            f'<text x="{MARGIN + 10}" y="{_n(canvas.y + 2)}" style="font-size:13px;font-weight:700;fill:var(--ground)">'
            f"{escape(line)}</text>"
        )
    canvas.y += 12
    for advice in drawing.advice:
        canvas.paragraph(f"→ {advice}", 12, "")
    canvas.paragraph(drawing.footnote, 11, "small dim")
