"""Locks are pickled as what `connect` was called with and their names; what belongs to a process is not pickled."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lockkit
import lockkit.aio

PARTS: dict[str, Callable[[Any], Any]] = {
    "client": lambda client: client,
    "lock": lambda client: client.lock("a", ttl=7, reentrant=True),
    "skipping": lambda client: client.lock("a", on_busy="skip"),
    "rwlock": lambda client: client.rwlock("a"),
    "semaphore": lambda client: client.semaphore("a", limit=2),
    "locks": lambda client: client.locks(["a", "b"]),
    "election": lambda client: client.election("a"),
    "once": lambda client: client.once("a", keep=60),
}

WORKER = """
import pickle, sys
lock = pickle.load(sys.stdin.buffer)
with lock as lease:
    print(lease.token, lease.metadata["pid"], lease.ttl)
"""


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("api", [lockkit, lockkit.aio])
def test_what_a_client_makes_comes_back_as_it_was(api: ModuleType, part: str, tmp_path: Path) -> None:
    """On one client of the process for all that was pickled of one."""
    with_url = api.connect(f"file://{tmp_path}", ttl=20)
    made = PARTS[part](with_url)

    first, second = (pickle.loads(pickle.dumps(made)) for _ in range(2))  # noqa: S301 - our own

    assert type(first) is type(made)
    assert repr(first) == repr(made)
    engines = {id(_engine(one)) for one in (first, second)}
    assert len(engines) == 1
    assert id(with_url._engine) not in engines


def _engine(made: Any) -> Any:  # noqa: ANN401 - of any part
    for path in ("_engine", "_core.members[0].engine", "_candidate._engine", "_once.engine"):
        try:
            return eval(f"made.{path}", {"made": made})  # noqa: S307 - our own
        except AttributeError:
            continue
    raise AssertionError(made)


def test_other_process_locks_the_same_lock(tmp_path: Path) -> None:
    """With the options that it was given, and as itself: `holders` shows the process that works."""
    with lockkit.connect(f"file://{tmp_path}") as client:
        lock = client.lock("a", ttl=7)
        with lock as lease:
            first = lease.token
        done = subprocess.run(
            [sys.executable, "-P", "-c", WORKER], input=pickle.dumps(lock), capture_output=True, check=True
        )
        token, pid, ttl = done.stdout.split()
        assert int(token) > first
        assert int(pid) != os.getpid()
        assert float(ttl) == 7


def test_environment_and_profile_are_pickled_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So no password leaves the process, and each process has its own."""
    monkeypatch.setenv("LOCKKIT_URL", "redis://:hunter2@localhost:1/0")
    pickled = pickle.dumps(lockkit.connect().lock("a"))
    assert b"hunter2" not in pickled
    monkeypatch.setenv("LOCKKIT_URL", f"file://{tmp_path}")
    assert str(tmp_path) in repr(pickle.loads(pickled))  # noqa: S301 - our own

    (tmp_path / "lockkit.toml").write_text('[profiles.prod]\nurl = "redis://:hunter2@localhost:1/0"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKKIT_CONFIG", str(tmp_path / "lockkit.toml"))
    pickled = pickle.dumps(lockkit.connect(profile="prod").lock("a"))
    assert b"hunter2" not in pickled
    assert b"prod" in pickled


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.deepcopy])
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: lockkit.connect("memory://"), "exclude only within this process"),
        (lambda: lockkit.connect("redis://:hunter2@localhost:1/0"), "have a password"),
        (lambda: lockkit.connect("redis://localhost:1/0", password="hunter2"), "have a password"),  # noqa: S106 - none
    ],
)
def test_what_cannot_be_used_elsewhere_says_why(
    make: Callable[[], Any], why: str, duplicate: Callable[[object], object]
) -> None:
    """And shows no password."""
    client = make()
    for part in (client, client.lock("a")):
        with pytest.raises(TypeError, match=f"cannot be pickled or copied: .*{why}") as error:
            duplicate(part)
        assert "hunter2" not in str(error.value)


def test_leases_are_not_pickled(tmp_path: Path) -> None:
    """Another process would neither renew one nor notice its loss; a lock that is held is."""
    with lockkit.connect(f"file://{tmp_path}") as client:
        lock = client.lock("a")
        with lock as lease:
            with pytest.raises(TypeError, match="cannot be pickled"):
                pickle.dumps(lease)
            assert pickle.loads(pickle.dumps(lock)).name == "a"  # noqa: S301 - our own


def test_decorated_function_is_pickled_with_its_lock(tmp_path: Path) -> None:
    """By value too, as the schedulers of dask, Ray and joblib do with functions of a script."""
    cloudpickle = pytest.importorskip("cloudpickle")
    with lockkit.connect(f"file://{tmp_path}") as client:

        @client.lock("stock:{product}")
        def book(product: int) -> list[str]:
            return [f"product {product}", *lockkit.connect(f"file://{tmp_path}").names()]

        assert cloudpickle.loads(cloudpickle.dumps(book))(17) == ["product 17", "stock:17"]
