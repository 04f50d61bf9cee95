"""Examines ``s3:``, ``gs:`` and ``az:`` URLs: has several clients write the same object at once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from lockkit.backends.object_store.record import Record, Version
from lockkit.backends.object_store.store import Store
from lockkit.doctor.addresses import is_loopback
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity
from lockkit.errors import BackendUnavailable, ConfigurationError

ROUNDS = 40
"""How often several create the same object, and how often several replace it. Fewer could miss a store that checks the
condition and writes in two steps; more take longer and cost more: these are 640 writes."""

CLIENTS = 8
"""How many write at once, each with connections of its own."""

_PAGE = "how-to/check-your-servers.md#object-stores"
_error = partial(Check, severity=Severity.ERROR, page=_PAGE)
_warning = partial(Check, severity=Severity.WARNING, page=_PAGE)

TWO_CREATE = _error("objects-two-create", risk="Two clients can acquire a lock that was never held, both at once.")
TWO_REPLACE = _error("objects-two-replace", risk="Two clients can acquire the same lock at once.")
VERSIONED = _warning("objects-versioned", risk="Each renewal leaves an old version, which is stored and paid for.")
NO_TLS = _warning("objects-no-tls", risk="Anyone who sees the network can read what holders store, and change answers.")


async def examine(examination: Examination) -> None:
    """Race clients for objects of the doctor's own, which are deleted afterwards if the rights allow it."""
    stores = [Store(examination.url, examination.options, examination.runtime) for _ in range(CLIENTS)]
    store, endpoint = stores[0], urlsplit(examination.options["endpoint"] or "")
    if endpoint.scheme == "http" and not is_loopback(endpoint.hostname or ""):
        seen = "The connection crosses a network without encryption."
        examination.find(NO_TLS, store.shown, seen, "Give an endpoint with https")
    try:
        await examination.time(store.shown, lambda: store.run(store.read("=ping")))
        await _race(examination, stores)
    finally:
        for one in stores:
            one.loop.stop()


async def _race(examination: Examination, stores: Sequence[Store]) -> None:
    store, version = stores[0], None
    names = [f"=doctor/{secrets.token_hex(8)}-{number}" for number in range(ROUNDS)]
    replaced: list[int] = []
    try:
        created = [await _count_winners(stores, name, None) for name in names]
        for _ in range(ROUNDS):
            _, version = await store.run(store.read(names[-1])) or (b"", None)
            replaced.append(await _count_winners(stores, names[-1], version))
        if store.scheme == "s3" and "version" in (version or ()):
            fix = "Suspend the bucket's versioning, or have a lifecycle rule delete noncurrent versions after a day"
            examination.find(VERSIONED, store.shown, "The bucket keeps versions of its objects.", fix)
    finally:
        try:
            await store.run(store.delete(names))
        except ConfigurationError:  # locks do not need this right
            examination.note("left behind", f"{ROUNDS} objects in =doctor/, for want of a right to delete them")
    fix = "Use a store that decides between conditional writes (If-None-Match, If-Match) atomically"
    for check, counts, what in ((TWO_CREATE, created, "create"), (TWO_REPLACE, replaced, "replace")):
        if wrong := sum(count > 1 for count in counts):
            seen = f"In {wrong} of {ROUNDS} races, several of {CLIENTS} clients could {what} the same object."
            examination.find(check, store.shown, seen, fix)


async def _count_winners(stores: Sequence[Store], name: str, expected: Version | None) -> int:
    """Have all clients write an object on the same condition; count those that know that they have."""
    outcomes = await stores[0].run_each(lambda store: store.write(name, Record().changed().encode(), expected), stores)
    # One that gets no answer may have won. It does not make two of one that knows.
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if len(errors) == len(stores) or any(not isinstance(error, BackendUnavailable) for error in errors):
        raise errors[0]
    return sum(outcome is not None for outcome in outcomes) - len(errors)
