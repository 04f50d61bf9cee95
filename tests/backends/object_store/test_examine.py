from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import obstore
import pytest

from lockkit.backends.object_store import examine
from lockkit.backends.object_store.record import Version
from lockkit.backends.object_store.store import Store
from lockkit_tools.servers import ObjectStoreServer
from tests.doctor.support import found


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The losers of a race wait for seconds at this server."""
    monkeypatch.setattr(examine, "ROUNDS", 2)
    monkeypatch.setattr(examine, "CLIENTS", 3)


def test_store_that_decides_has_no_finding(server: ObjectStoreServer) -> None:
    """And nothing is left of what the doctor has written, as far as it may delete."""
    assert found(server.url) == {}


def test_store_that_ignores_conditions_is_reported(server: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both for objects that are new, and for those that are replaced."""

    async def write(self: Store, name: str, content: bytes, expected: Version | None) -> Version | None:
        del expected
        stored: Any = await obstore.put_async(await self._opened(), name, content, mode="overwrite")
        return self._version(stored)

    monkeypatch.setattr(Store, "write", write)

    findings = found(server.url)

    assert set(findings) == {"objects-two-create", "objects-two-replace"}
    assert "In 2 of 2 races" in findings["objects-two-create"].seen


def test_bucket_that_keeps_versions_is_reported(server: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each renewal would stay in it for good."""
    version = Store._version

    def versioned(self: Store, stored: Mapping[str, Any]) -> Version:
        return {**version(self, stored), "version": "1"}

    monkeypatch.setattr(Store, "_version", versioned)

    assert set(found(server.url)) == {"objects-versioned"}


def test_clear_text_across_a_network_is_reported(server: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """To this machine it is none of anybody's business."""
    monkeypatch.setattr(examine, "is_loopback", lambda _: False)

    assert set(found(server.url)) == {"objects-no-tls"}
