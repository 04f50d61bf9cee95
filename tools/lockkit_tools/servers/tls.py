"""Certificates for servers on 127.0.0.1, made with the `openssl` program."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from lockkit_tools.servers.binaries import find_program
from lockkit_tools.servers.errors import ServerError

# Only for the life of a test server.
DAYS = "30"

NAMES = "IP:127.0.0.1,DNS:localhost"

# Made in 10 ms of CPU; an RSA key takes 100.
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")

# Python 3.13 and later check certificates as RFC 5280 has them (ssl.VERIFY_X509_STRICT).
_USAGE = """\
authorityKeyIdentifier=keyid
subjectKeyIdentifier=hash
keyUsage=critical,digitalSignature,keyEncipherment
extendedKeyUsage=serverAuth,clientAuth
"""


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files of an authority, and of a server and a client that it signed."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(directory: Path, *, names: str = NAMES) -> Certificates:
    """Makes an authority and signs one certificate for a server and one for a client, whose name is ``lockkit``."""
    ca, ca_key = directory / "ca.pem", directory / "ca.key"
    _openssl(
        *("req", "-x509", *_NEW_KEY, "-days", DAYS),
        *("-subj", "/CN=lockkit test authority", "-keyout", str(ca_key), "-out", str(ca)),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    server, server_key = _sign(directory, ca, ca_key, name="localhost", file="server", names=names)
    client, client_key = _sign(directory, ca, ca_key, name="lockkit", file="client", names=NAMES)
    return Certificates(ca, server, server_key, client, client_key)


def _sign(directory: Path, ca: Path, ca_key: Path, *, name: str, file: str, names: str) -> tuple[Path, Path]:
    certificate, key = directory / f"{file}.pem", directory / f"{file}.key"
    request, extensions = directory / f"{file}.csr", directory / f"{file}.ext"
    extensions.write_text(f"subjectAltName={names}\n{_USAGE}")
    _openssl(
        *("req", *_NEW_KEY, "-subj", f"/CN={name}"),
        *("-keyout", str(key), "-out", str(request)),
    )
    _openssl(
        *("x509", "-req", "-in", str(request), "-CA", str(ca), "-CAkey", str(ca_key)),
        *("-CAcreateserial", "-days", DAYS, "-extfile", str(extensions)),
        *("-out", str(certificate)),
    )
    return certificate, key


def _openssl(*arguments: str) -> None:
    done = subprocess.run(
        [str(find_program("openssl")), *arguments],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise ServerError(f"openssl {arguments[0]} failed:\n{done.stderr}")
