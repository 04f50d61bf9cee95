"""tooz: one interface over many servers, like lockkit. Its drivers differ in what they do when a holder dies."""

from __future__ import annotations

import secrets
from importlib import import_module
from urllib.parse import urlencode, urlsplit

from lockkit.units import Seconds
from lockkit.url import Url, parse
from lockkit_tools.bench.adapters.base import Adapter, Library


class Tooz(Adapter):
    """A coordinator with its heart beating, which is what keeps locks of Redis and etcd alive."""

    async def open(self) -> None:
        coordination = import_module("tooz.coordination")
        member = secrets.token_hex(8).encode()
        self._coordinator: Library = coordination.get_coordinator(coordinator_url(self.url, self.ttl), member)
        self._coordinator.start(start_heart=True)

    def lock(self, name: str) -> Library:
        return self._coordinator.get_lock(name.encode())

    def still_held(self, lock: Library, entered: Library) -> bool | None:
        """By its own opinion."""
        del entered
        return bool(lock.acquired)

    async def close(self) -> None:
        self._coordinator.stop()


def coordinator_url(url: str, ttl: Seconds) -> str:
    """Give tooz's URL for lockkit's. Its times are whole seconds."""
    parsed, parts = parse(url), urlsplit(url)
    seconds = str(max(1, int(ttl)))
    if parsed.base in {"redis", "valkey"}:
        # `timeout` is for the socket too: a short one would end a wait.
        options = {"lock_timeout": seconds, "timeout": seconds, "db": parsed.path.strip("/") or "0"}
        return f"redis://{_authority(parsed)}?{urlencode(options)}"
    if parsed.base in {"etcd", "etcd3"}:
        return f"etcd3+http://{parsed.hosts[0]}?{urlencode({'timeout': seconds, 'lock_timeout': seconds})}"
    if parsed.base in {"zookeeper", "zk"}:
        return f"kazoo://{parts.netloc}?{urlencode({'timeout': seconds})}"
    if parsed.base == "file":
        return f"file://{parsed.raw_path}"
    scheme = "mysql" if parsed.base in {"mysql", "mariadb"} else "postgresql"
    return f"{scheme}://{_authority(parsed)}{parts.path}"


def _authority(url: Url) -> str:
    """Give the first host with user and password as they are: tooz does not decode them."""
    host = url.hosts[0]
    user = f"{host.username or ''}:{host.password}@" if host.password else f"{host.username}@" if host.username else ""
    return f"{user}{host}"
