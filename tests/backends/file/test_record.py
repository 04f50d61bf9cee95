"""The text of a record, and the names of record files."""

from __future__ import annotations

import unicodedata
from math import inf

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from lockkit.backends.file.directory import record_name
from lockkit.backends.file.record import REMOVED, DamagedError, FileClaim, RemovedError, VersionError, decode, encode
from lockkit.backends.lock_state import Lease, LockState

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(
    lambda name: len(name.encode()) <= 255
)
OWNERS = st.text("0123456789abcdef", min_size=1, max_size=32)
CLAIMS = st.builds(
    FileClaim,
    owner=OWNERS,
    ttl=st.integers(10_000, 10**15).map(lambda us: us / 1e6),
    client=st.text("0123456789abcdef", min_size=16, max_size=16),
    metadata=st.just(""),
    mode=st.just("exclusive"),
    limit=st.just(1),
)
METADATA = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=200).map(
    lambda text: f'{{"text":"{text}"}}'
)
MODES = st.sampled_from([("exclusive", 1), ("shared", 1), ("permit", 1), ("permit", 100)])
WAITERS = st.builds(lambda claim, mode: claim._replace(mode=mode[0], limit=mode[1]), CLAIMS, MODES)
SHARES = st.builds(
    lambda claim, until, token, slot: Lease(claim, until, token, "shared" if slot is None else "permit", slot),
    claim=st.builds(lambda claim, text: claim._replace(ttl=0.0, metadata=text), CLAIMS, METADATA),
    until=st.integers(0, 10**15).map(lambda us: us / 1e6),
    token=st.integers(0, 2**63),
    slot=st.none() | st.integers(0, 100),
)


@st.composite
def ledgers(draw: st.DrawFn) -> LockState[FileClaim]:
    """Any state of a lock."""
    ledger: LockState[FileClaim] = LockState(draw(st.integers(0, 2**63)))
    ledger.until = draw(st.integers(0, 10**15)) / 1e6
    ledger.broken = tuple(draw(st.lists(OWNERS, max_size=2)))
    ledger.queue = draw(st.lists(WAITERS, max_size=5))
    if draw(st.booleans()):
        holder = draw(CLAIMS)._replace(ttl=0.0, metadata=draw(METADATA))
        ledger.leases, ledger.until = {holder.owner: Lease(holder, ledger.until, ledger.token)}, inf
    else:
        ledger.leases = {share.claim.owner: share for share in draw(st.lists(SHARES, max_size=3))}
        ledger.until = draw(st.sampled_from([ledger.until, inf]))
    if draw(st.booleans()):
        ledger.note = draw(st.text(st.characters(exclude_categories=["Cs"]))), draw(st.integers(0, 2**63))
    return ledger


def fields(ledger: LockState[FileClaim]) -> list[object]:
    """What makes two ledgers equal."""
    return [ledger.leases, ledger.until, ledger.token, ledger.broken, ledger.queue, ledger.note]


@given(ledger=ledgers(), name=NAMES, behind=st.binary(max_size=20))
def test_record_is_read_as_it_was_written(ledger: LockState[FileClaim], name: str, behind: bytes) -> None:
    """Also when the rest of a longer one stands behind it; and written again it is the same text."""
    escaped, _ = record_name(name)
    text = encode(ledger, escaped, "boot-1")

    read, boot = decode(text + behind, escaped)

    assert fields(read) == fields(ledger)
    assert boot == "boot-1"
    assert encode(read, escaped, boot) == text


@given(ledger=ledgers(), data=st.data())
def test_damage_is_recognised(ledger: LockState[FileClaim], data: st.DataObject) -> None:
    """A record with any one byte changed, or cut off anywhere, is no record."""
    text = encode(ledger, "name", "boot")
    position = data.draw(st.integers(0, len(text) - 1))
    changed = bytearray(text)
    changed[position] ^= data.draw(st.integers(1, 255))

    for damaged in (bytes(changed), text[:position], text[:position] + bytes(len(text) - position)):
        with pytest.raises((DamagedError, VersionError)):
            decode(damaged, "name")


def test_record_of_another_lock_version_or_state_is_told_apart() -> None:
    """A copied file, a newer lockkit, a file that is being removed."""
    text = encode(LockState(1), "name", "boot")

    with pytest.raises(DamagedError, match="record of the lock name"):
        decode(text, "other")
    assert decode(text, None)[0].token == 1
    with pytest.raises(VersionError, match=r"^2$"):
        decode(text.replace(b"record 1", b"record 2"), "name")
    with pytest.raises(RemovedError):
        decode(REMOVED + text, "name")


@given(first=NAMES, second=NAMES)
@example(first="A", second="a")
@example(first="é", second="e\u0301")
@example(first="a/b", second="a%2Fb")
@example(first="x" * 200, second="X" * 200)
@example(first="x" * 200, second="x" * 199)
@example(first="\u017f", second="s")
def test_different_names_are_different_files(first: str, second: str) -> None:
    """Also on file systems that fold case or normalise Unicode."""
    files = [unicodedata.normalize("NFC", record_name(name)[1]).casefold() for name in (first, second)]

    assert (files[0] == files[1]) == (first == second)


@given(name=NAMES)
@example(name="..")
@example(name=".")
@example(name="/")
@example(name="../../etc/passwd")
@example(name="clients")
@example(name="\U0001f512" * 63)
def test_no_name_leaves_the_directory(name: str) -> None:
    """Each is one plain file name that every file system takes."""
    escaped, file = record_name(name)

    assert file.endswith(".lock")
    assert "/" not in file
    assert not file.startswith(".")
    assert len(file) <= 255
    assert file.isascii()
    assert " " not in escaped
    assert "\n" not in escaped
