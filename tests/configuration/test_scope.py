"""``scope=`` refuses a backend that locks out fewer processes than its user thinks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

import lockkit
import lockkit.aio
from lockkit import doctor
from lockkit.errors import ConfigurationError

SCOPES = ("process", "machine", "network")
BACKENDS = {
    "memory://": "process",
    "file:///nowhere/locks": "machine",
    "sqlite:////nowhere/locks.db": "machine",
    "redis://nowhere.example": "network",
    "unix:///nowhere/redis.sock": "network",
    "redlock://a.example,b.example,c.example": "network",
    "zookeeper://nowhere.example": "network",
    "etcd://nowhere.example": "network",
    "s3://nowhere": "network",
    "postgresql://nowhere.example/db": "network",
    "postgresql://nowhere.example/db?mode=advisory": "network",
    "mysql://nowhere.example/db?mode=row": "network",
}


@pytest.fixture(autouse=True)
def _no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the settings of the machine out."""
    monkeypatch.chdir(tmp_path)
    for name in ("URL", "ENV", "CONFIG", "SCOPE"):
        monkeypatch.delenv(f"LOCKKIT_{name}", raising=False)
    monkeypatch.setenv("LOCKKIT_STATE_DIR", str(tmp_path / "state"))


@pytest.mark.parametrize("url", BACKENDS)
def test_backend_that_locks_out_fewer_is_refused(url: str) -> None:
    """At connect, before anything is sent; a wider one is as good."""
    own = SCOPES.index(BACKENDS[url])
    for wanted in SCOPES[: own + 1]:
        assert lockkit.connect(url, scope=wanted).capabilities.scope == BACKENDS[url]
    for wanted in SCOPES[own + 1 :]:
        with pytest.raises(ConfigurationError) as caught:
            lockkit.aio.connect(url, scope=wanted)
        assert str(caught.value).startswith(f"{url} locks out only other ")
        assert f"scope={wanted} asks for more" in str(caught.value)
        assert caught.value.backend == url


@pytest.mark.parametrize(
    "connect", [lockkit.connect, lockkit.aio.connect, doctor.examine], ids=["sync", "aio", "doctor"]
)
def test_scope_may_stand_in_url_profile_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connect: Callable[..., Any]
) -> None:
    """The error says where."""
    with pytest.raises(ConfigurationError, match="scope=machine asks for more"):
        connect("memory://?scope=machine")

    path = tmp_path / "lockkit.toml"
    path.write_text(f'[profiles.default]\nurl = "file:{tmp_path}"\nscope = "network"')
    with pytest.raises(ConfigurationError, match="scope=network asks for more") as caught:
        connect()
    assert str(caught.value).endswith(f"[profile 'default' in {path}]")

    path.unlink()
    monkeypatch.setenv("LOCKKIT_SCOPE", "network")
    with pytest.raises(ConfigurationError, match="LOCKKIT_SCOPE=network asks for more"):
        connect()
    monkeypatch.setenv("LOCKKIT_SCOPE", "netwrok")
    with pytest.raises(ConfigurationError, match=r"did you mean 'network'\?\) \[LOCKKIT_SCOPE\]"):
        connect()
    monkeypatch.setenv("LOCKKIT_SCOPE", "")
    with pytest.raises(ConfigurationError, match=r"must be one of process, machine, network \[LOCKKIT_SCOPE\]"):
        connect()


def test_what_is_given_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that means a lock of this process says so."""
    monkeypatch.setenv("LOCKKIT_SCOPE", "network")

    assert lockkit.connect("memory://?scope=process").capabilities.scope == "process"
    assert lockkit.connect("memory://?scope=network", scope="process").capabilities.scope == "process"


def test_unknown_scope_is_refused() -> None:
    """With the nearest."""
    with pytest.raises(ConfigurationError, match=r"scope='machin'.* must be one of .*did you mean 'machine'"):
        lockkit.connect("memory://", scope="machin")


def test_connection_of_the_application_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it turns out to be."""
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/locks.db")

    assert lockkit.from_client(redis.Redis(), scope="network").capabilities.scope == "network"
    assert lockkit.from_client(engine, scope="machine").capabilities.scope == "machine"
    with pytest.raises(ConfigurationError, match="scope=network asks for more"):
        lockkit.from_client(engine, scope="network")
    with pytest.raises(ConfigurationError, match="scope=network asks for more"):
        lockkit.aio.from_client(create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/locks.db"), scope="network")
    monkeypatch.setenv("LOCKKIT_SCOPE", "network")
    with pytest.raises(ConfigurationError, match="LOCKKIT_SCOPE=network asks for more"):
        lockkit.from_client(engine)
