"""
Dynalite decides conditional writes atomically, as DynamoDB does.

A fake that reads, compares and writes in separate steps lets two clients win, as moto 5.2.5 does in some of 150 rounds.
The conformance suite might pass on it by luck: so this is tested of the fake alone, without lockkit.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import botocore.session
import pytest
from botocore.exceptions import ClientError

from lockkit_tools.servers import Server

CONNECTIONS = 8
ROUNDS = 150


@pytest.fixture(scope="module")
def clients(server: Server) -> list[Any]:
    """As many clients, each with a connection of its own, to an empty table."""
    session = botocore.session.get_session()
    clients = [session.create_client("dynamodb", endpoint_url=f"http://{server.address}") for _ in range(CONNECTIONS)]
    clients[0].create_table(
        TableName="atomicity",
        AttributeDefinitions=[{"AttributeName": "name", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "name", "KeyType": "HASH"}],
        BillingMode="PAY_PER_REQUEST",
    )
    return clients


def won(client: Any, start: threading.Barrier, name: str, expected: int | None) -> bool:
    """Count the version of an item up if it is still the expected one (None: if there is no item)."""
    start.wait()
    condition = "attribute_not_exists(version)" if expected is None else "version = :expected"
    values = {":next": {"N": str((expected or 0) + 1)}}
    if expected is not None:
        values[":expected"] = {"N": str(expected)}
    try:
        client.update_item(
            TableName="atomicity",
            Key={"name": {"S": name}},
            UpdateExpression="SET version = :next",
            ConditionExpression=condition,
            ExpressionAttributeValues=values,
        )
    except ClientError as error:
        assert error.response["Error"]["Code"] == "ConditionalCheckFailedException"
        return False
    return True


@pytest.mark.parametrize("fresh", [True, False], ids=["create", "update"])
def test_exactly_one_of_many_conditional_writes_succeeds(clients: list[Any], *, fresh: bool) -> None:
    """In each round all connections write at once, and expect the same."""
    winners = []
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        for number in range(ROUNDS):
            start = threading.Barrier(CONNECTIONS)
            name, expected = (f"item-{number}", None) if fresh else ("item", number or None)
            writes = [threads.submit(won, client, start, name, expected) for client in clients]
            winners.append(sum(write.result() for write in writes))

    assert winners == [1] * ROUNDS
