"""
One question for each kind of server: does it answer yet?

On plain sockets, so that a server can be started and waited for without its driver.
Each function returns None when the server is ready, otherwise what it said; no answer is
an `OSError`.
"""

from __future__ import annotations

import json
import socket
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Any

from lockkit.units import Seconds
from lockkit_tools.servers.resp import RespConnection

if TYPE_CHECKING:
    import ssl


# A question that comes while a server begins to listen may never be answered; it is asked
# again after this time, seconds.
ASK_TIMEOUT = 1.0

# For calls to a server that is ready, which only a paused one or a very busy machine delays.
CALL_TIMEOUT = 10.0


def ask_redis(host: str, port: int) -> str | None:
    """PING; a server that loads its data answers with an error."""
    with RespConnection((host, port), timeout=ASK_TIMEOUT) as connection:
        connection.call("PING")
    return None


def ask_postgresql(host: str, port: int) -> str | None:
    """
    Begins a session and leaves before it logs in.

    PostgreSQL listens before it has recovered; asked then, it answers with an error
    (57P03) where it would otherwise say how to log in.
    """
    words = b"".join(word.encode() + b"\0" for word in ("user", "postgres", "database", "postgres", ""))
    protocol_3 = (3 << 16).to_bytes(4)
    request = (len(words) + 8).to_bytes(4) + protocol_3 + words
    with socket.create_connection((host, port), ASK_TIMEOUT) as connection:
        connection.sendall(request)
        answer = connection.recv(4096)
    if answer[:1] == b"R":
        return None
    return answer[5:].decode(errors="replace").replace("\0", " ") or "closed the connection"


def ask_mysql(host: str, port: int) -> str | None:
    """Waits for the greeting, which is the server's part to begin with."""
    with socket.create_connection((host, port), ASK_TIMEOUT) as connection:
        greeting = connection.recv(4096)
    protocol_10 = 10
    if len(greeting) > 4 and greeting[4] == protocol_10:
        return None
    return greeting[4:].decode(errors="replace") or "closed the connection"


def four_letters(host: str, port: int, word: str, *, timeout: Seconds = CALL_TIMEOUT) -> str:
    """ZooKeeper's answer to an administrator's word: ``srvr``, ``mntr``, ``wchs``, …."""
    with socket.create_connection((host, port), timeout) as connection:
        connection.sendall(word.encode())
        answer = b""
        while data := connection.recv(65_536):
            answer += data
    return answer.decode(errors="replace")


def ask_zookeeper(host: str, port: int) -> str | None:
    """A member that is not in a quorum answers, but has no mode."""
    answer = four_letters(host, port, "srvr", timeout=ASK_TIMEOUT)
    return None if "\nMode: " in answer else answer.strip() or "closed the connection"


def ask_etcd(host: str, port: int, *, tls: ssl.SSLContext | None = None) -> str | None:
    """A member answers before it knows a leader, and can do nothing until then."""
    has_leader = etcd_metrics(host, port, tls=tls, timeout=ASK_TIMEOUT).get("etcd_server_has_leader")
    return None if has_leader == "1" else "there is no leader"


def etcd_metrics(
    host: str, port: int, *, tls: ssl.SSLContext | None = None, timeout: Seconds = CALL_TIMEOUT
) -> dict[str, str]:
    """
    What a member counts and knows, by the names of its metrics.

    Asked instead of ``/health``, where a member that is over its space quota calls itself
    ill, and of the JSON gateway, which refuses certificates once users must log in.
    """
    text = _http(host, port, "GET", "/metrics", tls=tls, timeout=timeout)
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: value for name, _, value in lines}


def etcd_call(
    host: str, port: int, path: str, request: dict[str, Any], *, tls: ssl.SSLContext | None = None
) -> dict[str, Any]:
    """One call of etcd's JSON gateway."""
    answer: dict[str, Any] = json.loads(_http(host, port, "POST", path, json.dumps(request), tls=tls))
    return answer


def _http(
    host: str,
    port: int,
    method: str,
    path: str,
    body: str = "",
    *,
    tls: ssl.SSLContext | None,
    timeout: Seconds = CALL_TIMEOUT,
) -> str:
    connection = (
        HTTPConnection(host, port, timeout=timeout)
        if tls is None
        else HTTPSConnection(host, port, timeout=timeout, context=tls)
    )
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        answer = response.read().decode(errors="replace")
    except HTTPException as error:
        raise ConnectionError(f"the answer is no HTTP: {error!r}") from error
    finally:
        connection.close()
    if response.status != HTTPStatus.OK:
        raise ConnectionError(f"{path} answered {response.status}: {answer}")
    return answer


def http_status(host: str, port: int, method: str, path: str, body: bytes = b"") -> int:
    """The status of an answer over HTTP."""
    connection = HTTPConnection(host, port, timeout=CALL_TIMEOUT)
    try:
        connection.request(method, path, body)
        return connection.getresponse().status
    except HTTPException as error:
        raise OSError(f"no answer over HTTP: {error!r}") from error
    finally:
        connection.close()
