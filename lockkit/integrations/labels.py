"""The label under which metrics and spans count a lock."""

from __future__ import annotations

from lockkit.observers import LockEvent

__all__ = ["UNLABELLED", "template_of"]

UNLABELLED = "unlabelled"
"""The label of locks for which the application gave neither a template nor ``label=``."""


def template_of(event: LockEvent) -> str:
    """Return the template of the name, never the name: each value of a label is a time series of its own."""
    return UNLABELLED if event.label is None else event.label
