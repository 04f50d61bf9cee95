"""etcd: one member, or several."""

from __future__ import annotations

import platform
import ssl
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from lockkit_tools.servers.base import Ensemble, Member, wait_until
from lockkit_tools.servers.binaries import find_program
from lockkit_tools.servers.readiness import ask_etcd, etcd_call, etcd_metrics

# A follower that receives nothing for so long calls an election, in ms.  The shortest lease
# is one and a half of it, rounded up to seconds.
ELECTION_MS = 1000

# One member has nobody to wait for: it elects itself after this time.
ELECTION_ALONE_MS = 100


class EtcdServer(Member):
    """
    An etcd member on 127.0.0.1.

    See `Server` for its options; with TLS it asks for a client's certificate. `settings` are further flags without
    dashes, e.g. ``{"quota-backend-bytes": "1048576"}``.

    Attributes:
        peers: All members of its cluster; empty: it is alone.
    """

    kind = "etcd"
    peers: Sequence[EtcdServer] = ()

    @property
    def url(self) -> str:
        """``etcd://…``; with TLS ``etcds://…`` with the client's files in the query."""
        if not self.tls:
            return f"etcd://{self.address}"
        files = {
            "ca": str(self.certificates.ca),
            "cert": str(self.certificates.client),
            "key": str(self.certificates.client_key),
        }
        return f"etcds://{self.address}?{urlencode(files)}"

    @property
    def endpoint(self) -> str:
        """The address as etcd's own tools want it."""
        return f"{'https' if self.tls else 'http'}://{self.address}"

    @property
    def name(self) -> str:
        """The member's name in its cluster."""
        return f"member-{self.peers.index(self) + 1 if self.peers else 1}"

    @property
    def peer_url(self) -> str:
        """Where the other members reach this one."""
        return f"http://{self.host}:{self.port_for('peers')}"

    def call(self, path: str, **request: object) -> dict[str, Any]:
        """One call of the JSON gateway, e.g. ``call("/v3/lease/grant", TTL=5)``."""
        return etcd_call(self.host, self.port, path, request, tls=self._tls_context())

    def status(self) -> dict[str, Any]:
        """What the member says of itself: leader, revision, alarms."""
        return self.call("/v3/maintenance/status")

    def metrics(self) -> dict[str, str]:
        """What the member counts and knows, by the names of its metrics."""
        return etcd_metrics(self.host, self.port, tls=self._tls_context())

    def leads(self) -> bool:
        """Whether this member is the leader, as it sees itself."""
        return self.metrics()["etcd_server_is_leader"] == "1"

    def etcdctl(self, *arguments: str) -> str:
        """Runs `etcdctl` against this member and gives what it printed."""
        files: list[str] = []
        if self.tls:
            made = self.certificates
            files = [f"--cacert={made.ca}", f"--cert={made.client}", f"--key={made.client_key}"]
        program = str(find_program("etcdctl"))
        return self.run(program, f"--endpoints={self.endpoint}", *files, *arguments, ETCDCTL_API="3")

    def enable_auth(self, password: str) -> None:
        """Makes the user ``root`` with this password, and asks everybody to log in."""
        self.etcdctl("user", "add", f"root:{password}")
        self.etcdctl("user", "grant-role", "root", "root")
        self.etcdctl("auth", "enable")

    def command(self) -> Sequence[str]:
        election = ELECTION_MS if len(self.peers) > 1 else ELECTION_ALONE_MS
        flags = {
            "name": self.name,
            "data-dir": str(self.data),
            "listen-client-urls": self.endpoint,
            "advertise-client-urls": self.endpoint,
            "listen-peer-urls": self.peer_url,
            "initial-advertise-peer-urls": self.peer_url,
            "initial-cluster": ",".join(f"{peer.name}={peer.peer_url}" for peer in self.peers or [self]),
            "initial-cluster-token": "lockkit",
            "heartbeat-interval": str(election // 10),
            "election-timeout": str(election),
            "logger": "zap",
            "log-level": "warn",
            **(self._tls_flags() if self.tls else {}),
            **self.settings,
        }
        return [str(find_program("etcd")), *(f"--{name}={value}" for name, value in flags.items())]

    def environment(self) -> dict[str, str]:
        """With the consent that etcd 3.4 asks for on 64-bit ARM."""
        consent = {"ETCD_UNSUPPORTED_ARCH": "arm64"} if platform.machine() == "aarch64" else {}
        return super().environment() | consent

    def ask(self) -> str | None:
        """Ready when it knows a leader."""
        return ask_etcd(self.host, self.port, tls=self._tls_context())

    def _tls_flags(self) -> dict[str, str]:
        return {
            "cert-file": str(self.certificates.server),
            "key-file": str(self.certificates.server_key),
            "trusted-ca-file": str(self.certificates.ca),
            "client-cert-auth": "true",
        }

    def _tls_context(self) -> ssl.SSLContext | None:
        if not self.tls:
            return None
        context = ssl.create_default_context(cafile=str(self.certificates.ca))
        context.load_cert_chain(self.certificates.client, self.certificates.client_key)
        return context


class EtcdCluster(Ensemble[EtcdServer]):
    """
    etcd members that elect a leader.

    A member that lost its data does not come back by a start: the others know it by what it promised.

    Args:
        count: How many; a majority of them must run.
        settings: Further flags of each member.
    """

    kind = "etcd-cluster"

    def __init__(self, count: int = 3, *, settings: Mapping[str, str] | None = None) -> None:
        super().__init__([EtcdServer(settings=settings) for _ in range(count)])
        for member in self.members:
            member.peers = self.members

    def arrange(self) -> None:
        """Waits until all members agree on the leader."""
        wait_until(self._missing_agreement)

    def _missing_agreement(self) -> str | None:
        for member in self.members:
            if member.running and (missing := member.ask()) is not None:
                return missing
        leaders = [member for member in self.members if member.running and member.leads()]
        return None if len(leaders) == 1 else f"{len(leaders)} members lead"
