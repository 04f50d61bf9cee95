"""
Changes of a node that a request has in the queue of a lock: its data, and its mark.

Each change names the node by its path, which has the random owner of the request in it: if the node is gone, nothing is
changed.
"""

from __future__ import annotations

from typing import Any

from kazoo.exceptions import NoNodeError

from lockkit.backends.zookeeper.session import LockNode
from lockkit.units import Instant


async def replace_data(node: LockNode, data: bytes, until: Instant) -> bool:
    """Replace the data of a node; False if it is gone. Raises as `Session.answer`."""
    session = node.session
    await session.connected(until, patient=True)
    result = session.send_data(node, data, lambda current: session.client.set_async(node.path, current))
    try:
        await session.answer(result, until)
    except NoNodeError:
        return False
    return node.session_lives


async def mark(node: LockNode, end: str, until: Instant, *, behind: str | None = None) -> bool:
    """Create the mark of a node, and wake those that watch the node. Again, it changes nothing."""
    session = node.session
    await session.connected(until, patient=True)
    node.mark = end
    transaction = session.client.transaction()
    checks = 0 if behind is None else 1
    if behind is not None:
        transaction.check(behind, -1)

    def send(data: bytes) -> Any:  # noqa: ANN401 - kazoo has no types
        transaction.set_data(node.path, data)
        transaction.create(f"{node.path}{end}", ephemeral=True)
        return transaction.commit_async()

    failed = await session.committed(session.send_data(node, None, send), until)
    if failed is None or failed == checks + 1:  # it was created before, and the answer was lost
        return node.session_lives
    node.mark = None
    return False
