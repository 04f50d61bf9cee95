from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from json import JSONDecodeError
from types import SimpleNamespace
from typing import Any

import pytest
from obstore import exceptions

import lockkit
from lockkit.backends.object_store import store
from lockkit.backends.object_store.store import Store
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import BlockingRuntime
from lockkit.testing.face_driver import FACES, FaceDriver
from lockkit.testing.target import Face
from lockkit.testing.timing import PATIENCE
from lockkit.url import parse
from lockkit_tools.servers import ObjectStoreServer
from tests.backends.support import play


def store_at(text: str) -> Store:
    """Read a URL as the backend does."""
    url = parse(text)
    given: dict[str, Any] = dict.fromkeys(store.OPTIONS) | dict(url.query)
    return Store(url, given, BlockingRuntime())


@pytest.mark.parametrize(
    ("url", "kind", "prefix", "config"),
    [
        ("s3://bucket", "S3Store", None, {}),
        ("s3://bucket/a/b?region=eu-north-1", "S3Store", "a/b", {"region": "eu-north-1"}),
        ("s3://b.example?endpoint=http://h:9000", "S3Store", None, {"endpoint": "http://h:9000"}),
        ("gs://bucket/a", "GCSStore", "a", {}),
        ("gs://bucket?endpoint=http://h:4443", "GCSStore", None, {"base_url": "http://h:4443"}),
        ("az://container/a?account=acct", "AzureStore", "a", {"account_name": "acct"}),
        ("az://container?account=acct&endpoint=https://h", "AzureStore", None, {"endpoint": "https://h"}),
    ],
)
def test_url_says_which_store(url: str, kind: str, prefix: str | None, config: dict[str, str]) -> None:
    """Nothing is sent; no platform's own service is needed."""
    made = store_at(url).connect()

    assert type(made).__name__ == kind
    assert made.prefix == prefix
    assert config.items() <= {name.removeprefix("google_"): value for name, value in made.config.items()}.items()
    assert made.retry_config["max_retries"] == 0
    assert made.client_options["timeout"] == "5s"
    assert made.client_options["allow_http"] == str("http:" in url).lower()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://user:hunter2@bucket", "credentials come from"),
        ("s3:", "write s3://bucket/prefix"),
        ("az:///x", "write az://container/prefix"),
        ("s3://bucket:9000", "write s3://bucket/prefix"),
        ("s3://one,two", "write s3://bucket/prefix"),
        ("s3://b_%C3%A9", "write s3://bucket/prefix"),
        ("s3://bucket/a//b", "the prefix has"),
        ("s3://bucket/../b", "the prefix has"),
        ("s3://bucket/caf%C3%A9", "the prefix has"),
        (f"s3://bucket/{'a' * 201}", "the prefix has"),
        ("gs://bucket?region=eu", "region is for s3:// only"),
        ("s3://bucket?account=x", "account is for az:// only"),
        ("s3://bucket?endpoint=localhost:9000", "http://host:port"),
        ("s3://bucket?endpoint=http://user:hunter2@host", "percent-encode it"),
        ("s3://bucket?secret_access_key=hunter2", "secret_access_key"),
        ("s3://bucket?regoin=eu", "region"),
    ],
)
def test_bad_url_is_refused(url: str, problem: str) -> None:
    """At `connect`, with nothing sent and no password shown."""
    with pytest.raises(ConfigurationError, match=problem) as raised:
        lockkit.connect(url)

    assert "hunter2" not in str(raised.value)


def body(status: str, code: str) -> str:
    """What obstore says of an answer."""
    return f"Generic S3 error: … status code: {status}: <Error><Code>{code}</Code><Message>why</Message>\n\nmore"


@pytest.mark.parametrize(
    ("error", "kind", "sent", "text"),
    [
        (exceptions.PermissionDeniedError(body("403 Forbidden", "AccessDenied")), ConfigurationError, True, "list"),
        (exceptions.UnauthenticatedError("no"), ConfigurationError, True, "chain"),
        (exceptions.NotSupportedError("no"), ConfigurationError, True, "no"),
        (exceptions.GenericError(body("403 Forbidden", "AccessDenied")), ConfigurationError, True, "AccessDenied: why"),
        (exceptions.GenericError(body("501 Not Implemented", "NotImplemented")), ConfigurationError, True, "why"),
        (exceptions.GenericError(body("301 Moved Permanently", "PermanentRedirect")), ConfigurationError, True, "why"),
        (exceptions.GenericError(body("400 Bad Request", "RequestTimeout")), BackendUnavailable, True, "why"),
        (exceptions.GenericError(body("503 Slow Down", "SlowDown")), BackendUnavailable, True, "SlowDown: why"),
        (exceptions.GenericError("error sending request\n\nkind: Timeout,"), BackendUnavailable, True, "sending"),
        (exceptions.GenericError("error sending request\n\nkind: Connect,"), BackendUnavailable, False, "sending"),
        (TimeoutError(), BackendUnavailable, True, "no answer in time"),
        (exceptions.GenericError(body("404 Not Found", "NoSuchBucket")), ConfigurationError, True, "no such bucket"),
        (FileNotFoundError(body("404 Not Found", "NoSuchBucket")), ConfigurationError, True, "no such bucket"),
    ],
)
def test_errors_of_the_driver_become_lockkits(error: Exception, kind: type[LockError], sent: bool, text: str) -> None:  # noqa: FBT001 - of a table
    """A retry is worth it only where the store may answer differently; what was never sent need not be undone."""
    found = store_at("s3://bucket").translate(error)

    assert type(found) is kind
    assert found.backend == "s3://bucket"
    assert text in str(found)
    assert "more" not in str(found)
    assert getattr(found, "sent", True) is sent


def test_missing_bucket_and_missing_rights_are_told_apart(server: ObjectStoreServer) -> None:
    """Both at once, and not after retries; `ping` sees them, too."""
    for bucket, problem in (("closed", "AccessDenied"), ("missing", "AccessDenied|no such bucket")):
        with lockkit.connect(server.url.replace("locks", bucket)) as client:
            for call in (client.ping, client.lock("x").acquire, lambda one=client: list(one.names())):
                with pytest.raises(ConfigurationError, match=problem):
                    call()


def test_wrong_credentials_are_refused(server: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no secret in the message, nor in what caused it."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothunter2")
    with lockkit.connect(server.url) as client, pytest.raises(ConfigurationError, match="chain") as raised:
        client.lock("x").acquire(1)

    assert "hunter2" not in f"{raised.value} {raised.value.__cause__!r}"


def test_server_that_refuses_connections_was_sent_nothing() -> None:
    """So nothing has to be undone; the message says what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens there, and no other program can
        url = "s3://bucket?endpoint=http://{}:{}".format(*taken.getsockname())
        refused = pytest.raises(BackendUnavailable, match="is it running, and reachable from here")
        with lockkit.connect(url) as client, refused as raised:
            client.ping()

    assert isinstance(raised.value.__cause__, exceptions.BaseError | BackendUnavailable)


def test_boto3_is_asked_only_where_nothing_else_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is optional; where it finds no credentials, obstore looks for them itself."""
    asked: list[str] = []
    found: list[object] = ["credentials"]

    def provide() -> object:
        asked.append("boto3")
        if not found:
            raise ValueError
        return found[0]

    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", SimpleNamespace(Boto3CredentialProvider=provide))
    monkeypatch.setattr(store, "find_spec", lambda name: name)
    assert store._boto3_credentials() is None
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert store._boto3_credentials() == "credentials"
    found.clear()
    assert store._boto3_credentials() is None
    monkeypatch.setattr(store, "find_spec", lambda _: None)
    assert store._boto3_credentials() is None

    assert asked == ["boto3", "boto3"]


@pytest.fixture
def boto3(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have a stand-in for boto3 search for the credentials, which tests do without."""

    def install(search: Callable[[], object]) -> None:
        monkeypatch.setitem(sys.modules, "obstore.auth.boto3", SimpleNamespace(Boto3CredentialProvider=search))
        monkeypatch.setattr(store, "find_spec", lambda name: name)
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")

    return install


@pytest.mark.parametrize(
    "error", [LookupError("no profile typo\nmore"), FileNotFoundError("typo"), JSONDecodeError("typo", "hunter2", 0)]
)
def test_error_of_boto3_is_one_of_configuration(error: Exception, boto3: Callable[..., None]) -> None:
    """Also one that would otherwise say that there is no such object, or that boto3 has found nothing."""

    def fail() -> object:
        raise error

    boto3(fail)
    with lockkit.connect("s3://bucket") as client, pytest.raises(ConfigurationError, match=r"boto3.*typo") as raised:
        client.lock("x").acquire(1)

    assert "more" not in str(raised.value)
    assert "hunter2" not in f"{raised.value} {raised.value.__cause__!r}"


@pytest.mark.parametrize("face", FACES)
def test_search_for_credentials_that_hangs_delays_nobody(
    server: ObjectStoreServer, face: Face, boto3: Callable[..., None]
) -> None:
    """It goes on in a thread, the same for all calls."""
    found = {name.removeprefix("AWS_").lower(): value for name, value in server.credentials.items()}
    go_on, searches = threading.Event(), list[str]()

    def search() -> object:
        searches.append("boto3")
        assert go_on.wait(PATIENCE)
        return lambda: {**found, "token": None, "expires_at": None}

    async def body(driver: FaceDriver) -> None:
        client = driver.make_client()
        for _ in range(2):
            with pytest.raises(BackendUnavailable, match="no answer in time"):
                await client.lock("x").acquire(timeout=0)
        go_on.set()
        await client.ping()

    boto3(search)
    play(face, server.url, body)
    assert searches == ["boto3"]
