"""Every backend of the registry is documented in the same way."""

from __future__ import annotations

import re

import pytest

from lockkit import registry
from tests.docs.story import ROOT

README = (ROOT / "README.md").read_text()
URLS = (ROOT / "docs" / "reference" / "urls.md").read_text()
# Backends that are one module are one page, whatever the number of their schemes.
PAGES = sorted({builtin.target.partition(":")[0].rpartition(".")[2] for builtin in registry.BUILTIN.values()})
HEADINGS = [
    "Use it when",
    "URL and options",
    "How it works",
    "Tokens",
    "When the holder goes away",
    "Waiting",
    "What it does not promise",
    "Capabilities",
]


@pytest.mark.parametrize("page", PAGES)
def test_page_has_the_common_headings(page: str) -> None:
    """Who knows one page knows all; what is not promised has a place of its own."""
    text = (ROOT / "docs" / "backends" / f"{page}.md").read_text()

    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS


@pytest.mark.parametrize("page", PAGES)
def test_readme_links_the_page(page: str) -> None:
    """The table of the README leads to every backend."""
    assert f"docs/backends/{page}.md" in README


@pytest.mark.parametrize("scheme", registry.BUILTIN)
def test_url_reference_has_the_scheme(scheme: str) -> None:
    """Every scheme can be looked up."""
    assert f"`{scheme}:" in URLS


@pytest.mark.parametrize("scheme", registry.BUILTIN)
def test_page_names_every_option(scheme: str) -> None:
    """Options of a backend's own are on its page."""
    builtin = registry.BUILTIN[scheme]
    page = builtin.target.partition(":")[0].rpartition(".")[2]
    text = (ROOT / "docs" / "backends" / f"{page}.md").read_text()

    assert [name for name in registry.find(scheme).options if f"`{name}`" not in text] == []
