"""Pictures and pages are well-formed, need nothing else, and are readable in the terminal and on a phone."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console
from rich.style import Style

from lockkit_tools.lab import Run, load, run, scenario_names, terminal
from lockkit_tools.lab import html as pages
from lockkit_tools.lab import svg as pictures
from lockkit_tools.lab.svg import text_width

SVG = "{http://www.w3.org/2000/svg}"


class Drawn(NamedTuple):
    """A scenario that was played, with storage that compares tokens or without, as picture and as page."""

    run: Run
    picture: str
    page: str


@cache
def play(name: str, *, fenced: bool) -> Drawn:
    """Play and draw a scenario: when a test needs it, because each process that runs tests imports this."""
    played = run(load(name), fenced=fenced)
    return Drawn(played, pictures.draw(played), pages.draw(played, "lockkit lab 'a & b'"))


def parsed(text: str) -> ET.Element:
    """Return the root element of a well-formed text."""
    return ET.fromstring(text)  # noqa: S314 - what the lab has just written


@pytest.fixture(params=[(name, fenced) for name in scenario_names() for fenced in (False, True)], ids=str)
def drawn(request: pytest.FixtureRequest) -> Drawn:
    """Each scenario, without and with a guard."""
    name, fenced = request.param
    return play(name, fenced=fenced)


def test_picture_is_well_formed_and_named(drawn: Drawn) -> None:
    """A reader who hears it gets the same story."""
    root = parsed(drawn.picture)

    assert root.get("role") == "img"
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert description is not None
    assert title.text
    for result in drawn.run.results:
        assert result.verdict.headline in (description.text or "")
    assert (root.get("aria-labelledby") or "").split() == [title.get("id"), description.get("id")]


def test_picture_and_page_need_nothing_else(drawn: Drawn) -> None:
    """One file that can be mailed: no font, script, image or style from elsewhere."""
    for text in (drawn.picture, drawn.page):
        bare = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "http" not in bare
        assert not re.search(r"@import|<script|<image|<link|href=|src=|<foreignObject", bare)
        assert re.findall(r"url\((?!#)", bare) == []
        assert "prefers-color-scheme:dark" in bare


def test_everything_in_a_picture_is_inside_it(drawn: Drawn) -> None:
    """Nothing is cut off at the edge, by the widths of the widest usual font."""
    root = parsed(drawn.picture)
    width = float((root.get("viewBox") or "").split()[2])
    outside = []
    for text in root.iter(f"{SVG}text"):
        words, x = text.text or "", float(text.get("x") or 0)
        style = text.get("class") or ""
        size = (
            16 if "title" in style else 11 if "small" in style or "inside" in style else 10 if "number" in style else 12
        )
        wide = text_width(words, size)
        start = x - {"middle": wide / 2, "end": wide}.get(text.get("text-anchor") or "", 0)
        if "number" not in style and (start < 0 or start + wide > width + 2):
            outside.append(words)

    assert outside == []


def test_page_is_well_formed(drawn: Drawn) -> None:
    """The page is XML; it has the picture and the promises of each scene, and the command that repeats it."""
    root = parsed(drawn.page.removeprefix("<!doctype html>\n"))

    assert root.get("lang") == "en"
    assert len(root.findall(f".//{SVG}svg")) == 1
    assert len(root.findall(".//section")) == len(drawn.run.results)
    assert [one.text for one in root.iterfind(".//code")] == ["lockkit lab 'a & b'"]
    assert 'content="width=device-width, initial-scale=1"' in drawn.page


def test_lines_fit_the_terminal(drawn: Drawn) -> None:
    """From a narrow window to a wide one."""
    for width in (40, 60, 80, 200):
        lines = terminal.draw(drawn.run, width=width).plain.splitlines()

        assert max(map(len, lines)) <= min(width, terminal.WIDTH_MAX)


def test_terminal_shows_the_broken_promise() -> None:
    """What a reader looks for first."""
    text = terminal.draw(play("gc-pause", fenced=False).run).plain
    (lane,) = [line for line in text.splitlines() if line.startswith("A  ")]

    assert re.search(r"█ token 1 █+▒+─+$", lane)
    assert "BROKEN: a newer write was lost." in text
    assert "two holders" in terminal.draw(play("clock-jump", fenced=False).run).plain
    assert "CONTAINED" in terminal.draw(play("gc-pause", fenced=True).run).plain


def test_terminal_colours_clients_and_what_went_wrong() -> None:
    """Each character for itself: the colour of a client's name is not that of its whole line."""
    text, console = terminal.draw(play("gc-pause", fenced=False).run), Console()
    lane = text.plain.index("\nB  ") + 1

    name, idle, held, wrong = (
        text.get_style_at_offset(console, at)
        for at in (lane, text.plain.index("─", lane), text.plain.index("█", lane), text.plain.index("▒"))
    )

    assert name == held == Style(color="magenta")
    assert idle == Style(dim=True)
    assert wrong == Style(color="red", bold=True)


def luminance(colour: str) -> float:
    """Return the relative luminance, as WCAG 2 defines it."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio, as WCAG 2 defines it."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_contrast(theme: str) -> None:
    """At least 4.5, on the ground and inside of bars, in both themes."""
    light, _, dark = pictures.COLOURS.partition("@media")
    colours = dict(re.findall(r"--(\w+):(#[0-9a-f]{6})", light if theme == "light" else dark))
    texts = {"ink", "dim", "bad", "good", "fault", "round1", "round2"}
    bars = {name for name in colours if name.startswith("client")}

    assert len(bars) == 6
    weak = [name for name in texts if contrast(colours[name], colours["ground"]) < 4.5]
    assert weak + [name for name in bars if contrast(colours[name], colours["inside"]) < 4.5] == []
