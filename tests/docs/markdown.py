"""
Reads the fenced blocks of a Markdown page, and what is to be done with each.

An HTML comment right above a fence (invisible on the rendered page) says how the block is run:

==================================  ==================================================================
``<!-- run: continue -->``          goes on in the namespace and directory of the block before it
``<!-- run: output -->``            is what the block before it prints (``...`` stands for anything)
``<!-- run: file NAME -->``         is written to NAME, for the blocks that continue
``<!-- run: continue file NAME -->``  is written to NAME beside what the block before it made
``<!-- run: by PATH -->``           is run by PATH in this repository, which holds it word for word
``<!-- run: drawing -->``           is a picture made of characters, in the language ``text``: no code
==================================  ==================================================================

Without a comment, a block starts a new story: a fresh namespace in a fresh directory.
There is no way to say that code is not run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,}) *(?P<language>[\w+-]*)[^`]*$")
DIRECTIVE = re.compile(
    r"^ *<!-- run: (?P<continues>continue ?|(?=output))?(?P<verb>output|drawing|(?:file|by) (?P<argument>\S+))? ?-->$"
)


class PageError(Exception):
    """A page that cannot be run as it is written."""


@dataclass(frozen=True, slots=True)
class Block:
    """
    One fenced block.

    Attributes:
        page: The file it stands in.
        line: Line of its first line of code, counted from 1.
        language: First word after the fence.
        continues: Whether it belongs to the story of the block before it.
        verb: ``run``, ``output``, ``file``, ``by`` or ``drawing``.
        argument: The file name or path of ``file`` and ``by``, else empty.
        text: The code without its indentation.
    """

    page: Path
    line: int
    language: str
    continues: bool
    verb: str
    argument: str
    text: str

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"{self.page}:{self.line}"


def blocks(page: Path, text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = text.splitlines()
    directive: re.Match[str] | None = None
    at = 0
    while at < len(lines):
        place = f"{page}:{at + 1}"
        fence = FENCE.match(lines[at])
        if directive and not fence:
            raise PageError(f"{place}: no block follows {directive[0].strip()}")
        if fence:
            if not fence["language"]:
                raise PageError(f"{place}: a block must name its language")
            end = _closing(lines, at, fence["ticks"], place)
            found.append(_block(page, at, fence, directive, lines[at + 1 : end]))
            at = end
        directive = DIRECTIVE.match(lines[at])
        if lines[at].lstrip().startswith("<!-- run:") and not directive:
            raise PageError(f"{place}: cannot read {lines[at].strip()}")
        at += 1
    return found


def _block(page: Path, at: int, fence: re.Match[str], directive: re.Match[str] | None, lines: list[str]) -> Block:
    """The block whose fence stands at index `at`."""
    verb = ((directive["verb"] if directive else None) or "run").split()[0]
    return Block(
        page=page,
        line=at + 2,
        language=fence["language"],
        continues=bool(directive and directive["continues"] is not None),
        verb=verb,
        argument=(directive["argument"] if directive else None) or "",
        text="".join(line.removeprefix(fence["indent"]) + "\n" for line in lines),
    )


def _closing(lines: list[str], at: int, ticks: str, place: str) -> int:
    """Index of the line that closes the fence at `at`."""
    for end in range(at + 1, len(lines)):
        if lines[end].strip() == ticks:
            return end
    raise PageError(f"{place}: this block is never closed")


def stories(found: list[Block]) -> list[list[Block]]:
    """Groups blocks into what runs together."""
    groups: list[list[Block]] = []
    for block in found:
        if not block.continues:
            groups.append([block])
        elif groups:
            groups[-1].append(block)
        else:
            raise PageError(f"{block.place}: nothing stands before it to continue")
    return groups
