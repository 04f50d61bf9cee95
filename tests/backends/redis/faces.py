"""Runs tests that are coroutine functions, by one API or by both: import it in a ``conftest.py``."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest

from tests.backends.redis.support import Face
from tests.backends.support import StubHost


@pytest.fixture(params=["asyncio"])
def face(request: pytest.FixtureRequest) -> Face:
    """One API: backends and scripts are the same for the other; `both` is for what depends on connections."""
    return Face(request.param)


both = pytest.mark.parametrize("face", ["sync", "asyncio"], indirect=True)
sync_only = pytest.mark.parametrize("face", ["sync"], indirect=True)


@pytest.fixture
def host(face: Face) -> StubHost:
    """The engine's side of the API."""
    return face.host()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine function with the runtime of its host."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments: dict[str, Any] = pyfuncitem.funcargs
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments["face"].drive(partial(pyfuncitem.obj, **{name: arguments[name] for name in names}))
    return True
