"""Writes scenes as one self-contained HTML page: drawings, story, promises, and how to repeat it."""

from __future__ import annotations

from html import escape
from typing import Final

from lockkit_tools.lab.drawing import at_text, prepare, subtitle
from lockkit_tools.lab.run import Result, Run
from lockkit_tools.lab.svg import COLOURS, chart

_STYLE: Final = (
    "*{box-sizing:border-box}body{margin:0 auto;padding:1rem;max-width:46rem;background:var(--ground);color:var(--ink);"
    "font:1rem/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}"
    "h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.2rem;margin:2.5rem 0 .25rem}p{margin:.4rem 0}"
    "figure{margin:1rem 0}svg{display:block;width:100%;max-width:40rem;height:auto}"
    ".dim{color:var(--dim)}.verdict{color:var(--ground);padding:.6rem .9rem;border-radius:.4rem;font-weight:700}"
    ".kept{background:var(--good)}.contained{background:var(--fault)}.broken{background:var(--bad)}"
    "ol{padding-left:2.2rem}li{margin:.15rem 0}ol li{padding-left:4.2rem;text-indent:-4.2rem}"
    "time{color:var(--dim);font-variant-numeric:tabular-nums;display:inline-block;min-width:3.9rem;text-indent:0}"
    ".bad{color:var(--bad);font-weight:700}.good{color:var(--good);font-weight:700}"
    ".fault{color:var(--fault)}ul{padding-left:1.2rem}code{background:var(--shade);padding:.1rem .35rem;"
    "border-radius:.25rem;overflow-wrap:anywhere}"
)


def draw(run: Run, command: str) -> str:
    """Write all scenes of a scenario."""
    several = len(run.results) > 1
    title = run.scenario.title if several else run.results[0].scene.title
    parts = [f"<h1>{escape(title)}</h1>"]
    if several:
        parts.append(f"<p>{escape(run.scenario.about)}</p>")
    for index, result in enumerate(run.results):
        parts.append(_scene(result, run.seed, f"scene{index}", several=several))
    parts.append(f"<h2>Repeat it</h2><p><code>{escape(command)}</code></p>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f"<title>{escape(title)}</title><style>{COLOURS}{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _scene(result: Result, seed: int, key: str, *, several: bool) -> str:
    drawing, verdict = prepare(result), result.verdict
    heading = f"<h2>{escape(result.scene.title)}</h2>" if several else ""
    story = "".join(
        f"<li><time>{at_text(line.mark.at, drawing.end)}</time> "
        f'<span class="{line.mark.tone}">{escape(line.mark.text)}</span></li>'
        for line in drawing.lines
    )
    promises = "".join(
        f'<li><span class="{"good" if one.state == "held" else "bad"}">{"held" if one.state == "held" else "broken"}'
        f"</span> {escape(one.text)}: {escape(one.why)}.</li>"
        for one in verdict.promises
        if one.state != "none"
    )
    advice = "".join(f"<p>→ {escape(one)}</p>" for one in verdict.advice)
    return (
        f"<section>{heading}<p>{escape(result.scene.about)}</p>"
        f'<p class="dim">{escape(subtitle(result, seed))}</p><figure>{chart(result, key)}</figure>'
        f'<p class="verdict {verdict.word}">{escape(verdict.headline)}</p>{advice}<ol>{story}</ol>'
        f'<ul>{promises}</ul><p class="dim">Code: {escape(result.parts)}.</p></section>'
    )
