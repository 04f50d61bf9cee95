"""`lockkit verify` on several URLs at once, as their user would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from lockkit.configuration import registry
from lockkit.url import parse

# A case mostly waits: for a ttl, a process, a server. Each run has a place of its own at the servers. With more, two
# cores and one disk are late for ttls of half a second.
AT_ONCE = 3

# What must happen within 20 s by default; all servers and these runs share two cores.
PATIENCE = "60"


def lockkit(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs lockkit's command on a URL, which may hold a password and so is on no command line."""
    return subprocess.run(
        [sys.executable, "-m", "lockkit.cli", *arguments],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "LOCKKIT_URL": url, "LOCKKIT_TEST_PATIENCE": PATIENCE, "NO_COLOR": "1"},
    )


def in_all_modes(urls: Mapping[str, str]) -> dict[str, str]:
    """The same and, where a backend has several modes, each of them."""
    return {
        f"{name}-{mode}" if number else name: f"{url}?mode={mode}" if number else url
        for name, url in urls.items()
        for number, mode in enumerate(registry.modes(parse(url).scheme))
    }


@contextmanager
def verifications(urls: Mapping[str, str]) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """Begins the conformance suite on all URLs, some at a time; those that did not begin end with the context."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            yield {name: pool.submit(lockkit, url, "verify") for name, url in urls.items()}
        finally:
            pool.shutdown(cancel_futures=True)
