"""What each kind of server says of itself, asked for real."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from lockkit_tools.bench.machine import file_system
from lockkit_tools.bench.observers import watch
from lockkit_tools.servers import MariaServer, PostgresServer, RedisServer, Server

DURABILITY: list[tuple[Callable[[], Server], str, dict[str, str]]] = [
    (lambda: RedisServer(appendonly=True, appendfsync="always"), "Redis", {"appendfsync": "always", "save": "never"}),
    (lambda: PostgresServer(durable=True, password="p'w"), "PostgreSQL", {"fsync": "on", "synchronous_commit": "on"}),  # noqa: S106
    (lambda: MariaServer(durable=True, password="p'w"), "MariaDB", {"innodb_flush_log_at_trx_commit": "1"}),  # noqa: S106
]


@pytest.mark.parametrize(("make", "name", "expected"), DURABILITY)
def test_server_is_shown_with_its_version_and_what_makes_it_durable(
    make: Callable[[], Server], name: str, expected: dict[str, str]
) -> None:
    """Next to figures that depend on it. Other servers are asked in ``test_libraries.py``."""
    with make() as server:
        assert_shown(server.url, name, expected)


def assert_shown(url: str, name: str, expected: dict[str, str]) -> None:
    """Ask a server; the observer adds no command or connection to what it counts."""
    with watch(url) as observer:
        about = observer.about()
        observer.begin()
        seen = observer.end()

    assert about["server"] == name
    assert about["version"][0].isdigit()
    assert about.items() >= expected.items()
    assert seen["connections"] <= 1  # etcd counts open files: our own question's may still be closing
    assert seen.get("commands_per_second", 0) == 0 or name == "ZooKeeper"  # for which a question is a packet
    assert not any(password in str(about) for password in ("p'w", "p@ss"))


@pytest.mark.parametrize("scheme", ["postgresql", "mariadb", "etcd", "zookeeper", "redis"])
def test_server_that_does_not_answer_is_an_os_error_without_the_password(scheme: str) -> None:
    """So that the subject fails, and not the run."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]

        with pytest.raises(OSError) as caught:  # noqa: PT011 - whichever of its kinds
            watch(f"{scheme}://u:hidden@127.0.0.1:{port}/0")

    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "memory://", "redis+cluster://h", "etcds://h", "postgresql:///db"])
def test_who_cannot_be_asked_gives_nothing(url: str) -> None:
    """And nothing is connected to."""
    with watch(url) as observer:
        observer.begin()

        assert observer.end() == {}
        assert observer.about() == {}


def test_file_system_of_a_directory(tmp_path: Path) -> None:
    """On Linux by its name; of what is not there, nothing."""
    assert file_system(tmp_path)
    assert file_system(tmp_path / "none") == ""
    with watch(f"file://{tmp_path}") as observer:
        assert observer.about() == {"files on": file_system(tmp_path)}
