"""Every error leads to the section of the documentation about it."""

from __future__ import annotations

import re

import pytest

import lockkit
import lockkit.errors
from tests.docs.story import ROOT

ERRORS = [
    value for value in vars(lockkit.errors).values() if isinstance(value, type) and issubclass(value, lockkit.LockError)
]


def anchors(page: str) -> set[str]:
    """The anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("error_class", ERRORS, ids=lambda cls: cls.__name__)
def test_help_url_leads_to_a_section(error_class: type[lockkit.LockError]) -> None:
    """Its page exists, and has the section."""
    url = error_class("what happened").help_url

    page, _, anchor = url.removeprefix(lockkit.errors.DOCUMENTATION).partition("/#")
    assert anchor in anchors(page)


def test_error_of_an_application_leads_to_its_base() -> None:
    """Who derives an error of their own gets a page that exists."""

    class SeatTaken(lockkit.LockTimeout):
        """Of an application."""

    assert SeatTaken("taken").help_url == lockkit.LockTimeout("busy").help_url


def test_address_of_the_documentation_stands_in_one_place() -> None:
    """The site is built for the address that errors name."""
    assert f"site_url: {lockkit.errors.DOCUMENTATION}\n" in (ROOT / "mkdocs.yml").read_text()

    sources = [path for path in (ROOT / "lockkit").rglob("*.py") if path.name != "errors.py"]
    assert [path for path in sources if "readthedocs.io" in path.read_text()] == []


def test_messages_are_free_of_addresses() -> None:
    """They go into logs, over and over."""
    with lockkit.connect("memory://") as client, client.lock("a"), pytest.raises(lockkit.LockTimeout) as caught:
        client.lock("a").acquire(timeout=0)

    assert "http" not in str(caught.value)
    assert caught.value.help_url.endswith("reference/errors/#locktimeout")
