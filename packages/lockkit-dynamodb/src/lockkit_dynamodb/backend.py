"""Locks in a DynamoDB table."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from lockkit.backend import (
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    LockBackend,
    Option,
    Renewed,
    Unknown,
    decode_metadata,
)
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.expiry import Observations
from lockkit_dynamodb.table import ConditionFailed, Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockkit.backend import Host, Renewal, Request
    from lockkit.url import Url

DEFAULT_TABLE = "lockkit_locks"

# `name`, `owner`, `ttl` and others are reserved words of DynamoDB's expressions.
_NAMES = {"#owner": "owner", "#version": "version", "#token": "token", "#ttl": "ttl", "#metadata": "metadata"}
_TAKE = "SET #owner = :owner, #version = :next, #token = :next, #ttl = :ttl, #metadata = :metadata"
_RENEW = "SET #ttl = :ttl ADD #version :one"
_FREE = "REMOVE #owner ADD #version :one"
_UPDATE = "SET #metadata = :metadata"
_MINE = "#owner = :owner"
_UNCHANGED = "#version = :version"
_NEW = "attribute_not_exists(#version)"


class Item:
    """What stands in the table under the name of a lock."""

    __slots__ = ("metadata", "owner", "token", "ttl", "version")

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        """Read DynamoDB's form; no attributes are those of a name that was never used."""
        self.version = int(attributes.get("version", {"N": "0"})["N"])
        self.owner: str | None = attributes.get("owner", {}).get("S")
        self.token = int(attributes.get("token", {"N": "0"})["N"])
        self.ttl = float(attributes.get("ttl", {"N": "0"})["N"])
        self.metadata: str = attributes.get("metadata", {}).get("S", "")


class DynamoBackend(LockBackend):
    """
    Locks in a DynamoDB table.

    Each step is one conditional write to an item, which DynamoDB decides. Every write of a holder counts the item's
    version up. DynamoDB shows no clock, so clients observe expiry (`lockkit.expiry`).
    """

    capabilities = Capabilities(
        crash_release="ttl",
        min_ttl=0.1,
        ttl_granularity=0.0,
        fair=False,
        wakeup="poll",
        token_source="the version of the item, which every write counts up; it starts again if the item is deleted",
        survives_node_loss=False,
        survives_data_loss=False,
        shared_mode=False,
        clock_assumption="the monotonic clocks of holder and waiter run at the same rate, within 1 %",
        waiters_visible=False,
        scope="network",
        caveat="A dead holder's lock is taken, and no longer listed, by a client that has seen it for a whole ttl: the "
        "first attempt after a crash finds it held, however long ago that was.",
        metadata_update=True,
    )
    options: ClassVar[Mapping[str, Option]] = {
        "region": Option(str, "AWS region; else the environment's or the profile's"),
    }

    def __init__(self, table: str, settings: dict[str, Any], url: str, host: Host) -> None:
        """Connect at the first call."""
        self._url = url
        self._runtime = host.runtime
        self._table = Table(table, settings, url, host.runtime)
        self._observations = Observations[int](host.runtime)

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> DynamoBackend:
        if url.username is not None or len(url.hosts) > 1:
            message = (
                f"write dynamodb:/table?region=..., or dynamodb://host:port/table for a local server, not "
                f"{url.redacted()}; AWS credentials come from the environment, a profile or a role"
            )
            raise ConfigurationError(message)
        settings = {"region_name": options["region"]}
        if url.hosts:
            settings["endpoint_url"] = f"http://{url.hosts[0]}"
        return cls(url.path.strip("/") or DEFAULT_TABLE, settings, url.redacted(), host)

    @property
    def url(self) -> str:
        return self._url

    # -- statements ------------------------------------------------------------------------------------------------

    async def _read(self, name: str, answer_by: float = inf) -> Item:
        """Read the latest version of an item, and observe it."""
        answer = await self._table.call("get_item", answer_by, Key={"name": {"S": name}}, ConsistentRead=True)
        item = Item(answer.get("Item", {}))
        if item.owner is None:
            self._observations.forget(name)
        else:
            self._observations.see(name, item.version)
        return item

    async def _write(self, name: str, update: str, condition: str, answer_by: float = inf, **values: Any) -> bool:
        """Update an item on a condition; return whether it was met."""
        text = update + condition
        try:
            await self._table.call(
                "update_item",
                answer_by,
                Key={"name": {"S": name}},
                UpdateExpression=update,
                ConditionExpression=condition,
                ExpressionAttributeNames={key: value for key, value in _NAMES.items() if key in text},
                ExpressionAttributeValues={
                    f":{key}": {"S": value} if isinstance(value, str) else {"N": str(value)}
                    for key, value in {"one": 1, **values}.items()
                    if f":{key}" in text
                },
            )
        except ConditionFailed:
            return False
        return True

    def _remaining(self, name: str, item: Item) -> float:
        return self._observations.left(name, item.version, item.ttl)

    # -- acquiring -------------------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        name = request.name
        item = await self._read(name, request.answer_by)
        if item.owner is not None:
            remaining = self._remaining(name, item)
            if remaining > 0:
                return Busy(retry_after=remaining, owner=item.owner, metadata=item.metadata)
        request.state = item.version  # for `abandon`, also of a grant that comes too late: what the write expects
        granted = await self._write(
            name,
            _TAKE,
            _UNCHANGED if item.version else _NEW,
            request.answer_by,
            version=item.version,
            owner=request.owner,
            next=item.version + 1,
            ttl=request.ttl,
            metadata=request.metadata,
        )
        if not granted:
            request.state = None
            return Busy(retry_after=0.0)  # another client was faster
        self._observations.forget(name)
        return Grant(name, request.owner, token=item.version + 1, ttl=request.ttl)

    async def abandon(self, request: Request) -> None:
        """
        Undo a write whose answer was lost.

        It may still be on its way. It expects a version, so it comes to nothing once the item has another one.
        """
        expected: int | None = request.state
        while request.uncertain and expected is not None:
            item = await self._read(request.name, request.answer_by)
            if item.owner != request.owner and item.version != expected:
                break
            if await self._write(
                request.name,
                _FREE,
                _UNCHANGED if item.version else _NEW,
                request.answer_by,
                version=item.version,
            ):
                break
        request.state = None

    # -- holding ---------------------------------------------------------------------------------------------------

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        return [await self._renew(grant) for grant in grants]

    async def _renew(self, grant: Grant) -> Renewal:
        try:
            if await self._write(grant.name, _RENEW, _MINE, owner=grant.owner, ttl=grant.ttl):
                return Renewed()
            return await self._gone(grant)
        except BackendUnavailable as error:
            return Unknown(error)

    async def _gone(self, grant: Grant) -> Gone:
        item = await self._read(grant.name)
        return Gone("gone" if item.owner is None else "taken")

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        return await self._write(grant.name, _FREE, _MINE, answer_by, owner=grant.owner)

    async def update(self, grant: Grant, metadata: str) -> Gone | None:
        if await self._write(grant.name, _UPDATE, _MINE, owner=grant.owner, metadata=metadata):
            return None
        return await self._gone(grant)

    # -- inspection ------------------------------------------------------------------------------------------------

    async def holders(self, name: str) -> Sequence[Holder]:
        item = await self._read(name)
        if item.owner is None:
            return []
        remaining = self._remaining(name, item)
        return [Holder(item.owner, item.token, remaining, decode_metadata(item.metadata))] if remaining > 0 else []

    async def break_lock(self, name: str) -> bool:
        item = await self._read(name)
        if item.owner is None or self._remaining(name, item) <= 0:
            return False
        return await self._write(name, _FREE, _MINE, owner=item.owner)

    async def ping(self) -> None:
        await self._table.call("describe_table", inf)

    async def erase(self) -> None:
        await self._table.call("delete_table", inf)

    async def close(self) -> None:
        self._table.close()
