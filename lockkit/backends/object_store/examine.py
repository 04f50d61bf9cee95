"""Examines ``s3:``, ``gs:`` and ``az:`` URLs: has several clients write the same object at once."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from lockkit.backends.object_store.record import Record
from lockkit.backends.object_store.store import Place, Store, Version, place_of
from lockkit.doctor.addresses import is_loopback
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity
from lockkit.drivers import DriverLoop
from lockkit.errors import BackendUnavailable, ConfigurationError

_PAGE = "how-to/check-your-servers.md#object-stores"

ROUNDS = 40
"""How often several create the same object, and how often several replace it. Fewer could miss a store that checks the
condition and writes in two steps; more take longer and cost more: these are 640 writes."""

CLIENTS = 8
"""How many write at once, each with connections of its own."""

_error = partial(Check, severity=Severity.ERROR, page=_PAGE)
_warning = partial(Check, severity=Severity.WARNING, page=_PAGE)

TWO_CREATE = _error(
    "objects-two-create", risk="Two clients can acquire a lock that was never held before, both at once."
)
TWO_REPLACE = _error("objects-two-replace", risk="Two clients can acquire the same lock at once.")
VERSIONED = _warning(
    "objects-versioned", risk="Each renewal leaves an old version of the object behind, which is stored and paid for."
)
NO_TLS = _warning("objects-no-tls", risk="Anyone who sees the network can read what holders store, and change answers.")

_FIX = "Use a store that decides between conditional writes (If-None-Match, If-Match) atomically"


async def examine(examination: Examination) -> None:
    """Race clients for objects of the doctor's own, which are deleted afterwards if the rights allow it."""
    place = place_of(examination.url, examination.options)
    endpoint = urlsplit(examination.options["endpoint"] or "")
    if endpoint.scheme == "http" and not is_loopback(endpoint.hostname or ""):
        seen = "The connection crosses a network without encryption."
        examination.find(NO_TLS, place.shown, seen, "Give an endpoint with https")
    loop = DriverLoop(examination.runtime)
    store = Store(place)
    try:
        store.check_process()
        await examination.time(place.shown, lambda: loop.run(store.read("=ping")))
        await loop.run(_race(examination, place))
    finally:
        loop.stop()


async def _race(examination: Examination, place: Place) -> None:
    clients = [Store(place) for _ in range(CLIENTS)]
    folder = f"=doctor/{secrets.token_hex(8)}"
    names = [f"{folder}-{number}" for number in range(ROUNDS)]
    replaced: list[int] = []
    version: Version | None = None
    try:
        created = [len(await _write_at_once(clients, name, None)) for name in names]
        for _ in range(ROUNDS):
            found = await clients[0].read(names[-1])
            version = None if found is None else found[1]
            replaced.append(len(await _write_at_once(clients, names[-1], version)))
        if place.scheme == "s3" and "version" in (version or ()):
            fix = "Suspend the bucket's versioning, or have a lifecycle rule delete noncurrent versions after a day"
            examination.find(VERSIONED, place.shown, "The bucket keeps versions of its objects.", fix)
    finally:
        await _remove(examination, clients[0], names)
    for check, counts, what in ((TWO_CREATE, created, "create"), (TWO_REPLACE, replaced, "replace")):
        if wrong := sum(count > 1 for count in counts):
            seen = f"In {wrong} of {len(counts)} races, several of {CLIENTS} clients could {what} the same object."
            examination.find(check, place.shown, seen, _FIX)


async def _write_at_once(clients: Sequence[Store], name: str, expected: Version | None) -> Sequence[Version]:
    """Have all clients write an object on the same condition; return the versions of those that know they have."""
    writes = (client.write(name, Record().changed().encode(), expected) for client in clients)
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    # One that gets no answer may have won. It does not make two of one that knows.
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if len(errors) == len(clients) or any(not isinstance(error, BackendUnavailable) for error in errors):
        raise errors[0]
    return [version for version in outcomes if version is not None and not isinstance(version, BaseException)]


async def _remove(examination: Examination, store: Store, names: Sequence[str]) -> None:
    """Delete the doctor's objects, unless nobody has the right to: locks need it not."""
    try:
        await store.delete(names)
    except ConfigurationError:
        folder = names[0].rpartition("/")[0]
        examination.note("left behind", f"{len(names)} objects in {folder}/, for want of a right to delete them")
