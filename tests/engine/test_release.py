"""A stack that is used up while a lock is released."""

from __future__ import annotations

from typing import Any

import pytest

from lockkit.testing.face_driver import FaceDriver
from tests.faces import both_faces


@both_faces
async def test_body_that_uses_up_the_stack_leaves_no_lock_held(driver: FaceDriver) -> None:
    """Each block that was entered again can be left again; one that could not kept the lock for its ttl."""
    client = await driver.connect()

    async def nest(which: Any) -> None:  # noqa: ANN401 - a lock
        async with which:
            await nest(which)

    for which in (client.lock("x", reentrant=True), client.rwlock("y").read()):
        with pytest.raises(RecursionError):
            await nest(which)

    assert [name async for name in client.names()] == []
