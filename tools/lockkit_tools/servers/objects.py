"""An object store that speaks S3: SeaweedFS, all of it in one process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from lockkit_tools.servers.base import Server
from lockkit_tools.servers.binaries import find_program
from lockkit_tools.servers.readiness import http_status

BUCKET = "locks"

# It is there, and nobody has a right in it.
CLOSED_BUCKET = "closed"


class ObjectStoreServer(Server):
    """
    SeaweedFS on 127.0.0.1 with two buckets. Clients need `credentials` in their environment.

    See `Server` for its options; TLS is not among them. `settings` are further flags without dashes.
    """

    kind = "s3"

    @property
    def url(self) -> str:
        """``s3://locks?endpoint=…``."""
        return f"s3://{BUCKET}?endpoint=http://{self.address}&region=us-east-1"

    @property
    def credentials(self) -> Mapping[str, str]:  # type: ignore[override] # the password may be changed until the start
        """What the platform's usual chain reads."""
        return {"AWS_ACCESS_KEY_ID": "lockkit", "AWS_SECRET_ACCESS_KEY": self.password or "lockkit"}

    def prepare(self) -> None:
        """Write who may do what."""
        user, password = self.credentials.values()
        actions = [f"{action}:{BUCKET}" for action in ("Read", "Write", "List")]
        keys = {"accessKey": user, "secretKey": password}
        self.write("s3.json", json.dumps({"identities": [{"name": user, "credentials": [keys], "actions": actions}]}))

    def command(self) -> Sequence[str]:
        flags = {
            "dir": str(self.data),
            "ip": self.host,
            "ip.bind": self.host,
            "s3.config": str(self.directory / "s3.json"),
            "s3.port": str(self.port),
            "s3.port.grpc": str(self.port_for("clients' grpc")),
            # A bucket that is missing is to be an error, as elsewhere.
            "s3.autoCreateBucket": "false",
            "s3.iam": "false",
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "master.electionTimeout": "1s",  # the only one elects itself, after a restart in 3 s, by default in 20
            "master.volumeSizeLimitMB": "64",
            "master.telemetry": "false",
            "volume.max": "8",
            **self.settings,
        }
        for part in ("master", "volume", "filer"):
            flags[f"{part}.port"] = str(self.port_for(part))
            flags[f"{part}.port.grpc"] = str(self.port_for(f"{part}'s grpc"))
        return [str(find_program("weed")), "server", "-s3", *(f"-{name}={value}" for name, value in flags.items())]

    def ask(self) -> str | None:
        """Ready when it has made the buckets, and the part that speaks S3 is there."""
        for bucket in (BUCKET, CLOSED_BUCKET):
            made = http_status(self.host, self.port_for("filer"), "POST", f"/buckets/{bucket}/")
            if made not in {HTTPStatus.CREATED, HTTPStatus.CONFLICT}:
                return f"it makes no bucket ({made})"
        # The first write waits for a volume, on a busy machine for seconds.
        written = http_status(self.host, self.port_for("filer"), "PUT", f"/buckets/{BUCKET}/.first", b"written")
        if written != HTTPStatus.CREATED:
            return f"it stores nothing ({written})"
        health = http_status(self.host, self.port, "GET", "/healthz")
        return None if health == HTTPStatus.OK else f"it is not healthy ({health})"
