"""The table: one statement at a time, in a thread, within the time of a call."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import botocore.config
import botocore.exceptions
import botocore.loaders
import botocore.session

from lockkit.backend import CALL_SECONDS, seconds_left
from lockkit.drivers import in_thread
from lockkit.errors import BackendUnavailable, ConfigurationError

if TYPE_CHECKING:
    from lockkit.runtime import Runtime

CONNECTIONS = 50
"""Most connections that are kept. Calls beyond that open one each."""

_RETRY_CANNOT_FIX = frozenset({
    "AccessDeniedException", "ExpiredTokenException", "IncompleteSignatureException", "InvalidSignatureException",
    "MissingAuthenticationTokenException", "UnrecognizedClientException", "ValidationException",
})  # fmt: skip


class ConditionFailed(Exception):
    """The item is not as the statement expects: nothing was written."""


@cache
def _descriptions() -> botocore.loaders.Loader:
    """
    Load what botocore knows of DynamoDB: megabytes of JSON, once for a process and its children.

    A client that is only made has all of it read, and sends nothing.
    """
    loader = botocore.loaders.create_loader()
    _client(loader, region_name="us-east-1", aws_access_key_id="none", aws_secret_access_key="none")
    return loader


def _client(loader: botocore.loaders.Loader, **settings: Any) -> Any:  # noqa: ANN401 - botocore makes its classes late
    session = botocore.session.get_session()
    session.register_component("data_loader", loader)
    return session.create_client("dynamodb", **settings)


class Table:
    """
    A table of DynamoDB, created at the first use.

    botocore only blocks, and its timeouts are those of a client, not of a call. So each call runs in a thread, and the
    caller waits for it as long as it may. A thread whose caller has gone ends with botocore's own timeouts.
    """

    def __init__(self, name: str, settings: dict[str, Any], shown: str, runtime: Runtime) -> None:
        """Connect at the first call."""
        self._name = name
        self._settings = settings
        self._shown = shown
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._client: Any = None
        self._descriptions = _descriptions()  # now: the first call may have less time than that takes

    async def call(self, operation: str, answer_by: float, **arguments: Any) -> dict[str, Any]:
        """
        Call an operation of DynamoDB on the table.

        Raises:
            ConditionFailed: Its condition was not met.
            BackendUnavailable: No usable answer in time.
            ConfigurationError: What a retry cannot fix.
        """
        try:
            seconds = seconds_left(answer_by, self._runtime.now())
            return await in_thread(self._runtime, lambda: self._send(operation, arguments), seconds)
        except botocore.exceptions.ClientError as error:
            raise self._translated(error) from error
        except botocore.exceptions.NoRegionError as error:
            message = f"{self._shown}: {error} Append ?region=... to the URL, or set AWS_DEFAULT_REGION"
            raise ConfigurationError(message, backend=self._shown) from error
        except botocore.exceptions.NoCredentialsError as error:
            message = f"{self._shown}: {error}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role"
            raise ConfigurationError(message, backend=self._shown) from error
        except (botocore.exceptions.BotoCoreError, OSError) as error:
            raise BackendUnavailable(f"{self._shown} does not answer: {error}", backend=self._shown) from error

    def _translated(self, error: botocore.exceptions.ClientError) -> Exception:
        code = error.response["Error"]["Code"]
        if code == "ConditionalCheckFailedException":
            return ConditionFailed()
        message = f"{self._shown} refuses the request: {error}"
        if code in _RETRY_CANNOT_FIX:
            return ConfigurationError(message, backend=self._shown)
        return BackendUnavailable(message, backend=self._shown)

    # -- in the thread ---------------------------------------------------------------------------------------------

    def _send(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        with self._mutex:
            client = self._client = self._client or self._connect()
        call = getattr(client, operation)
        try:
            answer: dict[str, Any] = call(TableName=self._name, **arguments)
        except client.exceptions.ResourceNotFoundException:
            self._create(client)
            answer = call(TableName=self._name, **arguments)
        return answer

    def _connect(self) -> Any:  # noqa: ANN401 - as above
        config = botocore.config.Config(
            connect_timeout=CALL_SECONDS / 2,
            read_timeout=CALL_SECONDS,
            # A request that botocore repeats after a lost answer would find its own first write, and call it a failure.
            retries={"total_max_attempts": 1},
            max_pool_connections=CONNECTIONS,
        )
        return _client(self._descriptions, config=config, **self._settings)

    def _create(self, client: Any) -> None:  # noqa: ANN401 - as above
        """Create the table, unless another client does, and wait until it can be used; Amazon takes seconds for it."""
        with suppress(client.exceptions.ResourceInUseException):
            client.create_table(
                TableName=self._name,
                AttributeDefinitions=[{"AttributeName": "name", "AttributeType": "S"}],
                KeySchema=[{"AttributeName": "name", "KeyType": "HASH"}],
                BillingMode="PAY_PER_REQUEST",
            )
        pauses = {"Delay": 0.1, "MaxAttempts": int(CALL_SECONDS / 0.1)}
        client.get_waiter("table_exists").wait(TableName=self._name, WaiterConfig=pauses)

    def close(self) -> None:
        """Close the connections."""
        with self._mutex:
            client, self._client = self._client, None
        if client is not None:
            client.close()
