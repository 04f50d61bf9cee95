"""Certificate files of a client, for the backends that take them as options."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path


def client_context(files: Mapping[str, str | None], password: str | None = None) -> ssl.SSLContext:
    """
    Load the files of three options, each a path or None: authorities, certificate and private key.

    Fails with a `ValueError` that names the option, and no path: messages must not name the key file.
    """
    ca, cert, key = files
    for option, path in files.items():
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"the file of the option {option} cannot be read ({error.strerror})") from None
    problem = f"the file of the option {ca} must have certificates in PEM form"
    try:
        context = ssl.create_default_context(cafile=files[ca])
        problem = (
            f"the files of the options {cert} and {key} must be a certificate and its private key in PEM form, the key "
            "without a password unless another option gives it"
        )
        if first := files[cert] or files[key]:
            # Without a password OpenSSL would ask for one at the terminal.
            context.load_cert_chain(first, files[key], password or "")
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"{problem} ({error})") from None
    return context
