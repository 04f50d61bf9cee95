"""Whom locks exclude, if not everybody: an application may have workers on other machines."""

from __future__ import annotations

import logging
from typing import Protocol

from lockkit.backend import Capabilities

WITHIN = {"process": "threads of this process only", "machine": "processes of this machine only"}
"""Which others the locks of each narrow scope exclude."""


class _Client(Protocol):
    """`lockkit.Client` or `lockkit.aio.Client`: importing this loads neither."""

    @property
    def url(self) -> str: ...
    @property
    def capabilities(self) -> Capabilities: ...


def warn_if_narrow(client: _Client, what: str) -> None:
    """Warn if locks do not exclude other machines; `what` says who locks."""
    whom = WITHIN.get(client.capabilities.scope)
    if whom is not None:
        logging.getLogger("lockkit").warning(
            "%s at %s, which locks out %s: if workers run elsewhere too, set the URL of a lock server",
            what, client.url, whom,
        )  # fmt: skip
