"""What the commands print: tables and JSON on stdout, all else on stderr. rich handles colours (NO_COLOR)."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from lockkit.cli.status import SIGNALLED, status_of
from lockkit.errors import ConfigurationError, LockError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockkit.sync import Client

__all__ = ["in_options", "plain", "print_json", "refuse_private", "reporting", "say"]

_INTERRUPTED = SIGNALLED + 2


def say(message: str) -> None:
    """Print one line for a person (or the mail of cron) on stderr."""
    print(f"lockkit: {message}", file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """Print a value for programs on stdout. ASCII only: names and metadata may contain any character."""
    print(json.dumps(value, indent=2))


def plain(value: object) -> str:
    """
    Give a value as text that a terminal only shows.

    The holder of the lock writes its metadata: an escape sequence in it must not reach the reader's terminal.
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(value))


def in_options(message: str) -> str:
    """Give a message of the library in the words of the command line."""
    for word, option in (("timeout=", "--timeout"), ("holders()", "lockkit holders")):
        message = message.replace(f" {word}", f" {option}")
    return message


@contextmanager
def reporting() -> Iterator[None]:
    """
    Turn errors of the library into one line and the exit status of their kind; show its warnings too.

    Raises:
        typer.Exit: In place of a `LockError` or a Ctrl-C.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("lockkit: %(message)s"))
    logging.getLogger("lockkit").addHandler(handler)
    try:
        yield
    except LockError as error:
        say(plain(in_options(str(error))))
        raise typer.Exit(status_of(error)) from error
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    finally:
        logging.getLogger("lockkit").removeHandler(handler)


def refuse_private(client: Client) -> None:
    """
    Refuse a backend whose locks no other process can see.

    Raises:
        ConfigurationError: Its locks exclude nobody outside this process.
    """
    if client.capabilities.scope == "process":
        message = (
            f"{client.url} locks only within one process, so this command would exclude nobody. "
            "Give a backend that processes share: --url file:, redis://…"
        )
        raise ConfigurationError(message, backend=client.url)
