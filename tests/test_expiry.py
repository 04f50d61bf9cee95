"""When a client that is shown no clock may take a lock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from lockkit import expiry
from lockkit.expiry import Observations
from lockkit.runtime import BlockingRuntime, Runtime


class Clock:
    """A runtime's clock and mutex."""

    def __init__(self) -> None:
        self.time = 10.0
        self.runtime = cast("Runtime", SimpleNamespace(mutex=BlockingRuntime().mutex, now=lambda: self.time))


def test_lock_may_be_taken_once_a_version_was_seen_for_the_ttl() -> None:
    """Counted from the first time; a renewal makes another version, and what was forgotten is observed anew."""
    clock = Clock()
    observed = Observations[int](clock.runtime)
    left = []
    for clock.time, version in [(10.0, 1), (10.9, 1), (11.0, 2), (11.9, 2), (12.1, 2)]:
        observed.see("x", version)
        left.append(observed.left("x", version, 1.0))
    assert left == pytest.approx([1.0, 0.1, 1.0, 0.1, -0.1])
    assert observed.left("x", 1, 1.0) == 1.0
    assert observed.last("x") == 2

    observed.forget("x")

    assert observed.left("x", 2, 1.0) == 1.0
    assert observed.last("x") is None


def test_only_so_many_locks_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were seen last."""
    monkeypatch.setattr(expiry, "NAMES_MAX", 2)
    observed = Observations[int](Clock().runtime)
    for name in "abac":
        observed.see(name, 1)

    assert [observed.last(name) for name in "abc"] == [1, None, 1]
