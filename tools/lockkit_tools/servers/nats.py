"""NATS with JetStream."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

from lockkit_tools.servers.base import Server
from lockkit_tools.servers.binaries import find_program


class NatsServer(Server):
    """
    A NATS server on 127.0.0.1, for the tests of lockkit-nats.

    Args:
        jetstream: Whether it can store anything.
        options: See `Server`. With a password, the users are ``app``, and ``weak``, who may publish nothing.
    """

    kind = "nats"

    def __init__(self, *, jetstream: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.jetstream = jetstream

    @property
    def url(self) -> str:
        """``nats://…``, as the user ``app`` if there is a password."""
        login = "" if self.password is None else f"app:{self.password}@"
        return f"nats://{login}{self.address}"

    def prepare(self) -> None:
        configuration: dict[str, object] = {"listen": self.address}
        if self.jetstream:
            configuration["jetstream"] = {"store_dir": str(self.data)}
        if self.password is not None:
            app = {"user": "app", "password": self.password}
            weak = {"user": "weak", "password": self.password, "permissions": {"publish": {"deny": ">"}}}
            configuration["authorization"] = {"users": [app, weak]}
        self.write("nats.json", json.dumps(configuration))

    def command(self) -> Sequence[str]:
        return [str(find_program("nats-server")), "--config", str(self.directory / "nats.json")]

    def ask(self) -> str | None:
        """Ready when it greets: it does so after JetStream has come up."""
        with socket.create_connection((self.host, self.port), timeout=1) as connection:
            return None if connection.recv(4) == b"INFO" else "it does not greet"
