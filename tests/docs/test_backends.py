"""Every backend of the registry is documented in the same way."""

from __future__ import annotations

import re

import pytest

from lockkit.configuration import registry
from tests.docs.story import ROOT

README = (ROOT / "README.md").read_text()
URLS = (ROOT / "docs" / "reference" / "urls.md").read_text()
# In distributions of their own.
PACKAGES = ["dynamodb", "nats"]
SCHEMES = [*registry.BUILTIN, *PACKAGES]
# Backends that are one module are one page, whatever the number of their schemes.
FORMS = [(scheme, mode) for scheme in SCHEMES for mode in registry.modes(scheme)]


def page_of(scheme: str, mode: str | None) -> str:
    """Name the page of a scheme, in one of its modes."""
    if scheme in PACKAGES:
        return scheme
    builtin = registry.BUILTIN[scheme]
    target = builtin.target if mode is None else builtin.modes[mode]
    package, _, module = target.partition(":")[0].removeprefix("lockkit.backends.").partition(".")
    return f"sql_{module}" if package == "sql_session" else package


PAGES = sorted({page_of(scheme, mode) for scheme, mode in FORMS})
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
    """The README leads to every backend."""
    assert f"docs/backends/{page}.md" in README


@pytest.mark.parametrize("scheme", SCHEMES)
def test_url_reference_has_the_scheme(scheme: str) -> None:
    """Every scheme can be looked up."""
    assert f"`{scheme}:" in URLS


@pytest.mark.parametrize(("scheme", "mode"), FORMS)
def test_page_names_every_option(scheme: str, mode: str | None) -> None:
    """Options of a backend's own are on its page."""
    text = (ROOT / "docs" / "backends" / f"{page_of(scheme, mode)}.md").read_text()

    assert [name for name in registry.find(scheme, mode).options if f"`{name}`" not in text] == []
