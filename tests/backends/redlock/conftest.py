"""Runs coroutine functions by one API or by both."""

from __future__ import annotations

from tests.backends.redis.faces import face, host, pytest_pyfunc_call

__all__ = ["face", "host", "pytest_pyfunc_call"]
