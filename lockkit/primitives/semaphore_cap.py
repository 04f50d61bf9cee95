"""The cap of a semaphore: what all clients together may have of its permits, whatever their own limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockkit import validation
from lockkit.backend import split_space
from lockkit.engine.engine import Engine
from lockkit.engine.semaphore_caps import CAPS_NAME
from lockkit.engine.settings import INHERIT, LIMIT_MAX
from lockkit.errors import ConfigurationError

__all__ = ["read_cap", "set_cap"]


async def read_cap(engine: Engine[Any], name: str) -> int | None:
    """
    Ask for the cap of a semaphore; None if it has none.

    Raises:
        Unsupported: The backend cannot cap semaphores.
        BackendUnavailable: No answer.
    """
    name = split_space(name)[1]
    engine.caps.require(name)
    engine.client.ready()
    return (await engine.caps.read()).get(name)


async def set_cap(engine: Engine[Any], name: str, cap: int | None) -> None:
    """
    Set or remove the cap of a semaphore.

    Raises:
        Unsupported: The backend cannot cap semaphores.
        ConfigurationError: The cap is wrong.
        LockTimeout: Others changed caps for the client's whole default timeout.
        LockLost: The lease on the caps ended before the change.
        BackendUnavailable: No answer.
    """
    name = split_space(name)[1]
    engine.caps.require(name)
    given: object = cap
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= LIMIT_MAX):
        shown = validation.shown(cap)
        message = f"the cap of a semaphore must be a whole number from 0 to {LIMIT_MAX}, or None, not {shown}"
        raise ConfigurationError(message, name=name, backend=engine.url)
    settings = replace(engine.settings("semaphores", ttl=None, timeout=INHERIT), name=CAPS_NAME)
    lease = await engine.acquire(settings, settings.timeout)
    record = lease._record  # noqa: SLF001 - the engine made it
    error: BaseException | None = None
    try:
        await engine.caps.write(record, name, cap)
    except BaseException as raised:
        error = raised
        raise
    finally:
        await engine.releases.leave(record, error)
