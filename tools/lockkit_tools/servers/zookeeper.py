"""ZooKeeper: one server, or an ensemble."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from lockkit_tools.servers.base import Ensemble, Member
from lockkit_tools.servers.binaries import find_program, look_for_jar
from lockkit_tools.servers.errors import ServerMissing
from lockkit_tools.servers.readiness import ASK_TIMEOUT, ask_zookeeper, four_letters

# ZooKeeper's unit of time, in ms.  Sessions expire at its multiples, and a session timeout
# is at least two of it; much shorter, and a busy machine loses sessions.
TICK_MS = 200

# What a client may ask for at most (by default 20 ticks, which is 4 s here), in ms.
SESSION_MAX_MS = 120_000

# In ticks: an ensemble's member has so long to join its leader, and to keep up with it.  Longer
# notices later that the leader hangs; much shorter, and a busy machine elects leaders.
MEMBER_TICKS = 50

# A small heap, quick to start, and no files outside of the temporary directory.
JVM_OPTIONS = (
    "-Xms16m",
    "-Xmx192m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-Djava.net.preferIPv4Stack=true",
)

MAIN_CLASS = "org.apache.zookeeper.server.quorum.QuorumPeerMain"


class ZooKeeperServer(Member):
    """
    A ZooKeeper server on 127.0.0.1.

    Args:
        properties: Java system properties, e.g.
            ``{"znode.container.checkIntervalMs": "500"}``.
        options: See `Server`. With `tls`, `url` leads to a second port; clients need a certificate.
    """

    kind = "zookeeper"

    def __init__(self, *, properties: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.properties = dict(properties or {})
        self.peers: Sequence[ZooKeeperServer] = ()

    @property
    def url(self) -> str:
        """``zookeeper://…``; with TLS the files that kazoo needs are in the query."""
        if not self.tls:
            return f"zookeeper://{self.address}"
        files = {
            "use_ssl": "true",
            "ca": str(self.certificates.ca),
            "certfile": str(self.certificates.client),
            "keyfile": str(self.certificates.client_key),
        }
        return f"zookeeper://{self.host}:{self.port_for('tls')}?{urlencode(files)}"

    def four_letters(self, word: str) -> str:
        """The answer to ``srvr``, ``mntr``, ``dump``, ``wchs`` and the like."""
        return four_letters(self.host, self.port, word)

    def mode(self) -> str:
        """``standalone``, ``leader`` or ``follower``; empty while it is in no quorum."""
        lines = self.four_letters("srvr").splitlines()
        return next((line[6:] for line in lines if line.startswith("Mode: ")), "")

    def leads(self) -> bool:
        """Whether it leads others, as it sees itself."""
        return self.mode() == "leader"

    def command(self) -> Sequence[str]:
        properties = {
            "org.slf4j.simpleLogger.defaultLogLevel": "warn",
            "java.io.tmpdir": str(self.directory),
            "zookeeper.forceSync": "yes" if self.durable else "no",
            # Kilobytes by which the log grows; by default it begins with 64 MB of zeros.
            "zookeeper.preAllocSize": "1024",
            **self.properties,
        }
        options = [f"-D{name}={value}" for name, value in properties.items()]
        java = str(find_program("java"))
        configuration = str(self.directory / "zoo.cfg")
        return [java, *JVM_OPTIONS, *options, "-cp", _class_path(), MAIN_CLASS, configuration]

    def prepare(self) -> None:
        """Writes zoo.cfg, and the member's number if it is one of several."""
        lines = {
            "tickTime": str(TICK_MS),
            "maxSessionTimeout": str(SESSION_MAX_MS),
            "dataDir": str(self.data),
            "clientPort": str(self.port),
            "clientPortAddress": self.host,
            "maxClientCnxns": "0",
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "*",
            **self._ensemble_configuration(),
            **(self._tls_configuration() if self.tls else {}),
            **self.settings,
        }
        self.write("zoo.cfg", "".join(f"{name}={value}\n" for name, value in lines.items()))
        if self.peers:
            (self.data / "myid").write_text(f"{self.peers.index(self) + 1}\n")

    def ask(self) -> str | None:
        """Ready when it serves, also over TLS: as a member when it has found its leader."""
        missing = ask_zookeeper(self.host, self.port)
        if missing is None and self.tls:
            try:
                socket.create_connection((self.host, self.port_for("tls")), ASK_TIMEOUT).close()
            except OSError as error:
                return f"the port for TLS: {error}"
        return missing

    def _ensemble_configuration(self) -> dict[str, str]:
        if not self.peers:
            return {}
        members = {
            f"server.{number}": f"{peer.host}:{peer.port_for('quorum')}:{peer.port_for('election')}"
            for number, peer in enumerate(self.peers, start=1)
        }
        return {"initLimit": str(MEMBER_TICKS), "syncLimit": str(MEMBER_TICKS), **members}

    def _tls_configuration(self) -> dict[str, str]:
        # Key and certificate in one file; what it holds is known by its suffix.
        pair = self.certificates.server_key.read_text() + self.certificates.server.read_text()
        return {
            "secureClientPort": str(self.port_for("tls")),
            "secureClientPortAddress": self.host,
            "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
            "ssl.keyStore.location": str(self.write("store.pem", pair)),
            "ssl.trustStore.location": str(self.certificates.ca),
            "ssl.clientAuth": "need",
        }


class ZooKeeperEnsemble(Ensemble[ZooKeeperServer]):
    """
    ZooKeeper servers that elect a leader.

    Args:
        count: How many; a majority of them must run.
    """

    kind = "zookeeper-ensemble"

    def __init__(self, count: int = 3, **options: Any) -> None:
        super().__init__([ZooKeeperServer(**options) for _ in range(count)])
        for member in self.members:
            member.peers = self.members


def _class_path() -> str:
    """ZooKeeper, what writes its log, and what it needs for TLS."""
    if (jar := look_for_jar("zookeeper.jar")) is None:
        raise ServerMissing("no zookeeper.jar; try: python -m lockkit_tools.servers install zookeeper")
    if (logger := look_for_jar("slf4j-simple.jar")) is None:
        return f"{jar.parent}/*"  # ZooKeeper's own archive: a directory with all that it needs
    # Debian's jar names the others in its manifest, but not all of netty that TLS needs.
    return ":".join(map(str, [jar, logger, *sorted(jar.parent.glob("netty-*.jar"))]))
