"""What all commands share: the client, what they print (answers on stdout, all else on stderr), and errors."""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import typer

from lockkit.cli.status import SIGNALLED, status_of
from lockkit.configuration import profiles
from lockkit.errors import ConfigurationError, LockError
from lockkit.sync import Client
from lockkit.sync.client import open_client
from lockkit.validation import plain


@contextmanager
def connected(options: Any, settings: profiles.Settings | None = None) -> Iterator[Client]:  # noqa: ANN401 - any command
    """Connect to the backend that the options name; one whose locks no other process can see is refused."""
    with open_client(settings or profiles.resolve(options.url, options.profile, {})) as client:
        if client.capabilities.scope == "process":
            raise ConfigurationError(
                f"{client.url} locks only within one process, so this command would exclude nobody. "
                "Give a backend that processes share: --url file:, redis://…",
                backend=client.url,
            )
        yield client


def settings_told(options: Any) -> profiles.Settings:  # noqa: ANN401 - any command
    """
    Find the backend; if nothing names one, say on stderr that the locks are only for this machine.

    Also in the mail of cron: a crontab that is deployed to all machines looks like one for a single machine.
    """
    settings = profiles.resolve(options.url, options.profile, {})
    if settings.embedded:
        directory = profiles.default_directory() / "locks"
        say(
            f"nothing names a backend, so locks are files in {directory}, which lock out this user's processes on "
            "this machine only. To choose one, give a URL, set LOCKKIT_URL or write a lockkit.toml"
        )
    return settings


def say(message: str) -> None:
    """Print one line for a person (or the mail of cron) on stderr."""
    with suppress(OSError):  # nobody can read it: the exit status must not change for that
        print(f"lockkit: {plain(message)}", file=sys.stderr, flush=True)


def answer(options: Any, values: Mapping[str, object], text: str) -> None:  # noqa: ANN401 - any command with --json
    """Print what the user wants to know: with ``--json`` the values, else the text."""
    if options.as_json:
        print_json(values)
    else:
        print(plain(text))


def print_json(value: object) -> None:
    """Print a value for programs on stdout. ASCII only: names and metadata may contain any character."""
    print(json.dumps(value, indent=2))


_WORDS: Final = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"(?<= )(?<!option )timeout=(\d[\d.]*)", r"--timeout \1"),
        (r"(?<= )(?<!option )timeout=", "--timeout"),
        (r"\b(?:client\.)?holders\(\)", "lockkit holders"),
        (r"\bclient\.holders\(name\)", "lockkit holders NAME"),
        (r"\bforce=True\b", "--force"),
        (r"\bcapabilities\.\w+(, capabilities\.\w+)*", "see lockkit backends"),
        (r"\bask for each lock's holders\b", "use lockkit holders NAME"),
        (r"\bAsk for the holders of each name\b", "Use lockkit holders NAME"),
        (r"^(metadata|ttl|timeout|grace) (?=must|cannot|of election)", r"--\1 "),
        (r": every lock needs a limit\. .*", ""),
        (r": 0 tries once, None waits without limit", ""),
        (r"(?<=\d), or None(?=, not )", ", or none"),
        (r"\ba longer ttl\b", "a longer --ttl"),
        (r"^profile= ", "--profile "),
        (r"\bLOCKKIT_ENV or profile=", "LOCKKIT_ENV or --profile"),
        (r": give it as url\b", ": give it as --url, or as the argument URL"),
        (r", or sasl_options= of connect\(\)", ""),
    )
)
"""What the library says to a caller in Python, and the same for the user of the command line."""


def in_options(message: str) -> str:
    """Give a message of the library in the words of the command line: options and commands, no parameters and calls."""
    for pattern, words in _WORDS:
        message = pattern.sub(words, message)
    return message


def set_verbosity(count: int) -> None:
    """Show what the library logs, while `reporting`: with 1 what it notices (INFO), with 2 or more all (DEBUG)."""
    if count:
        logging.getLogger("lockkit").setLevel(logging.INFO if count == 1 else logging.DEBUG)


class _OneLine(logging.Formatter):
    """Prints one line for each record: texts of other clients and of servers cannot forge further ones."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of logging
        return plain(super().formatMessage(record))


@contextmanager
def reporting() -> Iterator[None]:
    """Turn errors of the library into one line and the exit status of their kind; show its warnings too."""
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("lockkit: %(message)s"))
    logger = logging.getLogger("lockkit")
    logger.addHandler(handler)
    level = logger.level
    try:
        yield
    except LockError as error:
        say(in_options(str(error)))
        if sys.stderr.isatty() or logger.isEnabledFor(logging.INFO):
            say(f"see {error.help_url}")  # not into the mail of cron
        raise typer.Exit(status_of(error)) from error
    except KeyboardInterrupt:
        raise typer.Exit(SIGNALLED + signal.SIGINT) from None
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)  # of `set_verbosity`
