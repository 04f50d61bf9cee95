"""A place of the conformance suite's own at a server that others use, and how it is emptied afterwards."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockkit import url
from lockkit.configuration import registry
from lockkit.runtime import BlockingRuntime, drive

if TYPE_CHECKING:
    from lockkit.backend import LockBackend, LossReason
    from lockkit.runtime import Runtime

__all__ = ["ScratchSpace", "scratch_space"]

Eraser = Callable[["ScratchSpace", Any], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ScratchSpace:
    """
    Where the suite may do what it likes.

    Attributes:
        url: For `lockkit.connect`. **Its text holds the password.**
        options: For `lockkit.connect`, too: those given, and those that make the place its own. **May hold passwords.**
        name: What marks everything in it; None if the backend has no way to keep clients apart.
        above: A directory above it that was not there before.
    """

    url: url.Url = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)
    name: str | None
    above: Path | None = None

    def erase(self) -> None:
        """
        Remove whatever is in it. Blocks.

        Raises:
            LockError: The backend cannot be reached, or does not allow it.
        """
        if self.name is not None:
            drive(self._erase())

    async def _erase(self) -> None:
        host = _Host()
        backend, _ = registry.open_backend(self.url, self.options, host)
        try:
            await _eraser(self, backend)(self, backend)
        finally:
            await backend.close()


class _Host:
    """The engine's side, for a backend that locks nothing."""

    def __init__(self) -> None:
        self.runtime: Runtime = BlockingRuntime()

    def lost(self, owner: str, reason: LossReason) -> None:
        """Nothing is held."""

    def confirm_soon(self) -> None:
        """Nothing is held."""


def scratch_space(given: url.Url, options: Mapping[str, Any]) -> ScratchSpace:
    """
    Find a place of one's own at a backend: a key prefix, a table, or a directory. No I/O.

    Args:
        given: The backend.
        options: Given beside its URL.

    Raises:
        ConfigurationError: The URL is wrong, or a driver is missing.
    """
    name = f"lockkit_verify_{secrets.token_hex(6)}"
    backend_class = registry.find(given.scheme, options.get("mode", dict(given.query).get("mode")))
    for option in ("prefix", "table"):
        if option in backend_class.options:
            return ScratchSpace(given, {**options, option: name}, name)
    if given.base == "file":
        backend, _ = registry.open_backend(given, options, _Host())
        above = Path(cast("Any", backend).url.removeprefix("file://"))
        made = None if above.exists() else above
        return ScratchSpace(url.parse(f"file://{above}/{name}"), options, name, made)
    return ScratchSpace(given, options, None)


def _eraser(place: ScratchSpace, backend: LockBackend) -> Eraser:
    if hasattr(backend, "tables"):
        return _drop_tables
    if "prefix" not in backend.options:
        return _remove_directory
    return {"etcd": _delete_range, "etcd3": _delete_range, "etcds": _delete_range, "zookeeper": _delete_nodes,
            "zk": _delete_nodes}.get(place.url.base, _delete_keys)  # fmt: skip


async def _remove_directory(place: ScratchSpace, backend: LockBackend) -> None:
    del backend
    with suppress(FileNotFoundError):  # no case was run
        shutil.rmtree(place.url.path)
    if place.above is not None:
        with suppress(OSError):  # somebody else uses it by now
            place.above.rmdir()


async def _drop_tables(place: ScratchSpace, backend: Any) -> None:  # noqa: ANN401 - those with tables
    from lockkit.backends.sql.schema import quoted  # noqa: PLC0415 - needs SQLAlchemy
    from lockkit.backends.sql.statement import Statement  # noqa: PLC0415

    del place
    for table in backend.tables:
        name = quoted(table, backend.database.engine.dialect)
        await backend.database.run(Statement(f"DROP TABLE IF EXISTS {name}"), again=True)


async def _delete_nodes(place: ScratchSpace, backend: Any) -> None:  # noqa: ANN401 - ZooKeeperBackend
    del place
    session = await backend._any_session()
    session.client.delete(backend._tree.root, recursive=True)


async def _delete_range(place: ScratchSpace, backend: Any) -> None:  # noqa: ANN401 - EtcdBackend
    from lockkit.backends.etcd import rpc_pb2 as rpc  # noqa: PLC0415 - needs protobuf
    from lockkit.backends.etcd.connection import TXN  # noqa: PLC0415

    # "0" is what comes after "/".
    deletion = rpc.DeleteRangeRequest(key=f"{place.name}/".encode(), range_end=f"{place.name}0".encode())
    request = rpc.TxnRequest(success=[rpc.RequestOp(request_delete_range=deletion)])
    await backend._cluster.call(TXN, request, resend=True)


async def _delete_keys(place: ScratchSpace, backend: LockBackend) -> None:
    """Delete what has the name in its key, on every Redis node where that can be."""
    from lockkit.backends.redis.node import open_node  # noqa: PLC0415 - needs redis-py
    from lockkit.backends.redis.resp import pack  # noqa: PLC0415

    host = _Host()
    for target in await _redis_targets(place, backend, host):
        node = open_node(host.runtime, target)
        try:
            cursor: Any = b"0"
            while True:
                cursor, keys = cast(
                    "Any", await node.call(pack("SCAN", cursor, "MATCH", f"*{place.name}*", "COUNT", 500))
                )
                # One by one: in a Cluster they lie in different slots.
                for key in keys:
                    await node.call(pack("DEL", key), resend=True)
                if cursor == b"0":
                    break
        finally:
            await node.close()


async def _redis_targets(place: ScratchSpace, backend: LockBackend, host: Any) -> list[Any]:  # noqa: ANN401 - a `Host`
    from lockkit.backends.redis.options import open_topology  # noqa: PLC0415 - needs redis-py

    _, options = registry.split_options(type(backend), place.url, place.options)
    if place.url.base in {"redlock", "redlocks"}:
        from lockkit.backends.redlock.addresses import url_targets  # noqa: PLC0415
        from lockkit.backends.redlock.backend import OPTIONS  # noqa: PLC0415

        driver = {name: value for name, value in options.items() if name not in OPTIONS}
        return list(url_targets(place.url, options, driver, host.runtime.kind))
    topology: Any = open_topology(place.url, options, host)
    try:
        nodes = await topology.masters() if hasattr(topology, "masters") else [await topology.node_for("")]
        return [node.target for node in nodes]
    finally:
        await topology.close()
