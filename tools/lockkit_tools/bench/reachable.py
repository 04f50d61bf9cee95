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
    """Ask every server for an answer, of any kind."""
    until = monotonic() + ANSWER_SECONDS
    asked = [_Question(url) for url in dict.fromkeys(urls)]
    for question in asked:
        question.thread.join(max(0.0, until - monotonic()))
    problems = []
    for question in asked:
        if question.thread.is_alive():
            problems.append(f"{question.shown} does not answer within {ANSWER_SECONDS:g} s")
        elif isinstance(question.error, BackendUnavailable):
            problems.append(str(question.error).rstrip("."))
        elif question.error is not None:
            raise question.error
    if problems:
        message = f"{'; '.join(problems)}. Nothing was measured: start what is missing, or leave out its URL"
        raise BackendUnavailable(message)


class _Question:
    """One server, asked in a thread of its own: a driver may wait longer than its user wants to."""

    def __init__(self, url: str) -> None:
        self.error: LockError | None = None
        self._client = lockkit.connect(url)
        self.shown = self._client.url
        # A daemon: the process ends although a driver hangs.
        self.thread = threading.Thread(target=self._ask, name="lockkit-bench-ask", daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        try:
            with self._client as client:
                client.ping()
        except LockError as error:
            self.error = error
