"""
A hook of mkdocs: what the site's search finds first, full names of methods, the version, and the changelog.

Search leaves out decisions and generated tables, and ranks what a reader looks for first (Material for MkDocs, "search
exclusion" and "search boosting").
"""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LEFT_OUT = (
    "decisions/",
    "comparison/capabilities.md",
    "comparison/conformance.md",
    "comparison/measured",
    "comparison/peers.md",
    "reference/extras.md",
)
RANKS = [
    (3.0, ("how-to/", "integrations/", "databases/", "tutorials/first-lock.md", "index.md", "changelog.md")),
    (2.0, ("backends/", "reference/api/sync.md", "comparison/redlock-debate.md")),
    (0.5, ("reference/api/", "reference/backend-api.md")),
    (1.0, ("reference/",)),
    (0.6, ("explanation/", "comparison/", "choose/", "tutorials/")),
]
METHOD = re.compile(
    r'(<h\d id="[\w.]+\.([A-Z]\w*)\.(\w+)" class="doc doc-heading">\s*'
    r'<span class="doc doc-object-name doc-(?:function|attribute)-name">)\3(</span>)'
)


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:  # noqa: ANN401 - of mkdocs
    """Called by mkdocs with the source of each page."""
    source = page.file.src_uri
    if source.startswith(LEFT_OUT):
        page.meta["search"] = {"exclude": True}
    else:
        rank = next(rank for rank, begins in RANKS if source.startswith(begins))
        page.meta.setdefault("search", {"boost": rank})
    if source == "changelog.md":
        released = (ROOT / "CHANGELOG.md").read_text().partition("<!-- changelog follows -->")[2]
        overview = sorted(
            ROOT.glob("changelog.d/overview-*.md"), key=lambda path: int(re.findall(r"\d+", path.name)[0])
        )
        texts = "\n".join("- " + path.read_text().strip().replace("\n", "\n  ") for path in overview)
        markdown += f"\n{released}\n## Not released yet\n\n{texts}\n"
    return markdown.replace("{version}", version("lockkit").partition("+")[0]) if source == "index.md" else markdown


def on_page_content(html: str, **_: object) -> str:
    """Called by mkdocs with each page as HTML: methods and attributes are named with their class."""
    return METHOD.sub(r"\1\2.\3\4", html)
