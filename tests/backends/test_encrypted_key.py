"""A private key with a password that the URL does not give: an error, and no question at the terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockkit_tools.servers.tls import make_certificates

ACQUIRE = """
import sys, lockkit
try:
    with lockkit.connect(sys.argv[1]) as client:
        client.lock("a").acquire(timeout=1)
except lockkit.ConfigurationError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("rediss://127.0.0.1:1?ssl_certfile={cert}&ssl_keyfile={key}", "needs ssl_password"),
        ("mariadb://127.0.0.1:1/locks?ssl_ca={ca}&ssl_cert={cert}&ssl_key={key}", "needs ssl_key_password"),
        ("zookeeper://127.0.0.1:1?use_ssl=1&ca={ca}&certfile={cert}&keyfile={key}", "without a password"),
        ("etcds://127.0.0.1:1?ca={ca}&cert={cert}&key={key}", "without a password"),
    ],
    ids=["redis", "mariadb", "zookeeper", "etcd"],
)
def test_nobody_is_asked_for_the_password_of_a_key(tmp_path: Path, url: str, advice: str) -> None:
    """OpenSSL asks by default: a service started at a terminal would hang there, another read its standard input."""
    files = make_certificates(tmp_path)
    encrypted = tmp_path / "encrypted.key"
    command = ["openssl", "pkey", "-in", str(files.client_key), "-aes256", "-passout", "pass:secret"]
    subprocess.run([*command, "-out", str(encrypted)], check=True)

    done = subprocess.run(
        [sys.executable, "-c", ACQUIRE, url.format(ca=files.ca, cert=files.client, key=encrypted)],
        capture_output=True, text=True, input="secret\n", start_new_session=True, timeout=60, check=True,
    )  # fmt: skip

    assert "pass phrase" not in done.stderr
    assert advice in done.stdout
