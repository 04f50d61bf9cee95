"""NATS with JetStream."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from lockkit_tools.servers.base import Server
from lockkit_tools.servers.binaries import find_program


class NatsServer(Server):
    """A NATS server with JetStream on 127.0.0.1, for the tests of a backend: lockkit itself has none for it."""

    kind = "nats"

    @property
    def url(self) -> str:
        """``nats://…``."""
        return f"nats://{self.address}"

    def command(self) -> Sequence[str]:
        listen = ("--addr", self.host, "--port", str(self.port))
        return [str(find_program("nats-server")), *listen, "--jetstream", "--store_dir", str(self.data)]

    def ask(self) -> str | None:
        """Ready when it greets: it does so after JetStream has come up."""
        with socket.create_connection((self.host, self.port), timeout=1) as connection:
            return None if connection.recv(4) == b"INFO" else "it does not greet"
