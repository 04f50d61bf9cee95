"""HTML and SVG from Python: what is put in is escaped unless it was made here."""

from __future__ import annotations

from html import escape

_VOID = frozenset({"meta", "br", "rect", "line", "circle", "path"})
"""Elements without content; SVG's may be written so too."""


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float) -> Html:
    """Make an element."""
    words = [name]
    for key, value in attributes.items():
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(text)}"')
    opening = " ".join(words)
    if name in _VOID and not children:
        return Html(f"<{opening}/>" if name != "meta" else f"<{opening}>")
    inner = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    return Html(f"<{opening}>{inner}</{name}>")
