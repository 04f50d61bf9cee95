"""Write scenes as one HTML page: the picture of `--svg`, the promises, and the command that repeats each."""

from __future__ import annotations

from html import escape
from typing import Final

from lockkit_tools.lab import svg
from lockkit_tools.lab.run import Run

_STYLE: Final = (
    "body{margin:0 auto;padding:1rem;max-width:40rem;background:var(--ground);color:var(--ink);"
    "font:1rem/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}"
    "svg{display:block;width:100%;height:auto}h2{font-size:1.1rem}ul{padding-left:1.2rem}"
    ".bad{color:var(--bad);font-weight:700}.good{color:var(--good);font-weight:700}"
    "code{background:var(--shade);padding:.1rem .35rem;overflow-wrap:anywhere}"
)


def draw(run: Run, command: str) -> str:
    """Write all scenes of a scenario."""
    title = escape(svg.title(run))
    promises = "".join(
        f"<section><h2>Promises: {escape(result.scene.title)}</h2><ul>"
        + "".join(
            f'<li><span class="{"good" if one.state == "held" else "bad"}">{one.state}</span> '
            f"{escape(one.text)}: {escape(one.why)}.</li>"
            for one in result.verdict.promises
            if one.state != "none"
        )
        + "</ul></section>"
        for result in run.results
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f"<title>{title}</title><style>{svg.COLOURS}{_STYLE}</style></head>"
        f"<body><main>{svg.draw(run)}{promises}<h2>Repeat it</h2><p><code>{escape(command)}</code></p></main></body>"
        "</html>\n"
    )
