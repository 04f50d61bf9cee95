"""Asks all servers for an answer before anything is measured: else each subject would wait for them in its turn."""

from __future__ import annotations

import threading
from collections.abc import Collection

import lockkit
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import monotonic

ANSWER_SECONDS = 10.0
"""How long the servers have to answer, all at the same time. Longer keeps the user waiting for what will fail; shorter
gives up on servers that are starting, or far away."""


def require_answers(urls: Collection[str]) -> None:
    """Ask every server for an answer, each in a thread of its own: a driver may wait longer than its user wants to."""
    until = monotonic() + ANSWER_SECONDS
    asked: list[tuple[str, threading.Thread]] = []
    errors: dict[str, LockError] = {}
    for url in dict.fromkeys(urls):
        client = lockkit.connect(url)
        # A daemon: the process ends although a driver hangs.
        asked.append((client.url, threading.Thread(target=_ask, args=(client, errors), daemon=True)))
        asked[-1][1].start()
    problems = []
    for shown, thread in asked:
        thread.join(max(0.0, until - monotonic()))
        error = errors.get(shown)
        if thread.is_alive():
            problems.append(f"{shown} does not answer within {ANSWER_SECONDS:g} s")
        elif isinstance(error, BackendUnavailable):
            problems.append(str(error).rstrip("."))
        elif error is not None:
            raise error
    if problems:
        message = f"{'; '.join(problems)}. Nothing was measured: start what is missing, or leave out its URL"
        raise BackendUnavailable(message)


def _ask(client: lockkit.Client, errors: dict[str, LockError]) -> None:
    try:
        with client:
            client.ping()
    except LockError as error:
        errors[client.url] = error
