"""
One record file: its format, and opening, reading, writing and making it. Nothing here decides who holds the lock.

Format, version 1: text, one `LockState`::

    lockkit-record 1 CRC32 SIZE           of what follows: checksum (hexadecimal), and size of the whole in bytes
    BOOT NAME TOKEN UNTIL_US BROKEN       boot id; escaped name; last token; end of lease or offer; broken owner
    OWNER CLIENT TTL_US                   the holder
    METADATA                              the holder's JSON
    + OWNER CLIENT UNTIL_US TOKEN SLOT METADATA
                                          those that hold the lock beside one another, one a line; SLOT of permits only
    OWNER CLIENT TTL_US [MODE]            the waiters, first come first, one a line; of a reader ``s``, of a permit its
                                          limit, of others nothing
    note END_US TEXT                      the note, if there is one: JSON text, and the end of its life

or, written under the flock by the process that is about to remove the file: ``lockkit-removed``.

``-`` means none. After SIZE bytes there may be the rest of an earlier, longer record.
Times are µs of the machine's clock that goes on while it is suspended, and mean nothing under another boot id. END_US
is of the wall clock: notes survive a reboot.

A record is written by a single ``write``, and read whole: a reader sees the old record or the new one. The checksum
reveals anything else (a page that never reached the disk before the power failed).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import threading
import zlib
from collections.abc import Callable
from math import inf
from typing import NamedTuple, TypeVar

from lockkit.backend import Mode
from lockkit.backends.file.directory import Directory, boot_id, is_at, refuse_foreign, reserve, unlink
from lockkit.backends.lock_state import LockState, Share
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.validation import decode_json

T = TypeVar("T")

SIZE_MAX = 999_999
"""Largest record, bytes: some ten thousand waiting clients."""

REMOVED = b"lockkit-removed\n"
"""Written before a record is removed, for the clients that have it open."""

LINK_CHECK_SECONDS = 0.1
"""How often operations that take nothing check whether another program removed an open record (lockkit itself writes
`REMOVED`). Not each time: it costs 1 µs itself, and makes Linux stamp the next write precisely, which costs the file
system another 2 µs."""

_BLOCKED = -1  # of UNTIL_US: the head of the queue does not fit beside those that hold the lock

HEAD = re.compile(rb"lockkit-record 1 ([0-9a-f]{8}) ([0-9]{6})\n")
_HEAD_SIZE = len("lockkit-record 1 01234567 000000\n")
_OTHER_VERSION = re.compile(rb"lockkit-record ([0-9]{1,9}) ")
_WORD = re.compile(r"[!-~]+")
# The client id becomes part of a path.
_CLIENT = re.compile(r"[0-9a-f]+|-")

# Looked up once: one acquire and release calls them eight times.
_flock = fcntl.flock
_pread = os.pread
_pwrite = os.pwrite

_LOCK = fcntl.LOCK_EX | fcntl.LOCK_NB
_UNLOCK = fcntl.LOCK_UN
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Without it, the next read after each write would write its time back to the inode.
_NO_ATIME = getattr(os, "O_NOATIME", 0)
# Enough for most records; a longer one takes a second read. Python allocates objects up to 512 bytes faster.
_READ_SIZE = 478


class FileClaim(NamedTuple):
    """
    One acquisition of one client.

    Attributes:
        owner: Its random id.
        ttl: The ttl that it asked for, seconds; 0 in a holder that was read from a record.
        client: Name of the client's file; empty in the placeholder of a damaged record.
        metadata: JSON text. Written for the holders only.
        mode: Beside whom it is held; written for waiters only.
        limit: Of a permit; written for waiters only.
    """

    owner: str
    ttl: float
    client: str
    metadata: str = ""
    mode: Mode = "exclusive"
    limit: int = 1


class DamagedError(ValueError):
    """The text is no record: empty, cut off, or changed by another program."""


class VersionError(ValueError):
    """The record has a format that this lockkit does not know. The message is the version."""


class RemovedError(ValueError):
    """The file is not the record any more: open it again."""


def encode(state: LockState[FileClaim], name: str, boot: str) -> bytes:
    """Turn the state of a lock into a record."""
    holder = state.holder
    # Rounded to the nearest, so that a record that is read and written back stays as it is. A lease may lose half a µs,
    # far less than the 2 ms by which its holder gives it up earlier.
    until_us = int(state.until * 1e6 + 0.5) if state.until != inf else _BLOCKED
    first = "-\n-" if holder is None else f"{holder.owner} {holder.client or '-'} 0\n{holder.metadata or '-'}"
    lines = f"{boot} {name} {state.token} {until_us} {','.join(state.broken) or '-'}\n{first}\n"
    if state.shares:
        lines += "".join(map(_share_line, state.shares.values()))
    if state.queue:
        lines += "".join(map(_waiter_line, state.queue))
    if state.note is not None:
        lines += f"note {state.note[1]} {json.dumps(state.note[0])}\n"
    body = lines.encode("ascii")
    return b"lockkit-record 1 %08x %06d\n%b" % (zlib.crc32(body), _HEAD_SIZE + len(body), body)


def _share_line(share: Share[FileClaim]) -> str:
    claim, slot = share.claim, "-" if share.slot is None else share.slot
    until_us = int(share.until * 1e6 + 0.5)
    return f"+ {claim.owner} {claim.client} {until_us} {share.token} {slot} {claim.metadata or '-'}\n"


def _waiter_line(waiter: FileClaim) -> str:
    mode = "" if waiter.mode == "exclusive" else " s" if waiter.mode == "shared" else f" {waiter.limit}"
    return f"{waiter.owner} {waiter.client} {int(waiter.ttl * 1e6 + 0.5)}{mode}\n"


def _size(text: bytes) -> int:
    """Read the size of a record from its beginning, bytes."""
    head = HEAD.match(text)
    if head is None:
        if text.startswith(REMOVED):
            raise RemovedError
        other = _OTHER_VERSION.match(text)
        if other is not None and other[1] != b"1":
            raise VersionError(other[1].decode())
        message = "empty" if not text else "no record"
        raise DamagedError(message)
    return int(head[2])


def decode(text: bytes, name: str | None) -> tuple[LockState[FileClaim], str]:
    """Turn a record into the state of a lock."""
    size = _size(text)
    body = text[_HEAD_SIZE:size]
    if len(text) < size or zlib.crc32(body) != int(text[17:25], 16):
        message = "cut off" if len(text) < size else "its checksum is wrong"
        raise DamagedError(message)
    try:
        first, holder, metadata, *others = body.decode("ascii").removesuffix("\n").split("\n")
        boot, stored, token, until_us, broken = first.split(" ")
        state: LockState[FileClaim] = LockState(int(token))
        state.until = inf if int(until_us) == _BLOCKED else int(until_us) / 1e6
        state.broken = () if broken == "-" else tuple(broken.split(","))
        if holder != "-":
            state.holder = _claim(holder, "" if metadata == "-" else metadata)
        if others and others[-1].startswith("note "):
            _, end_us, note = others.pop().split(" ", 2)
            state.note = _note(note), int(end_us)
        for line in others:
            if line.startswith("+ "):
                share = _share(line)
                state.shares[share.claim.owner] = share
            else:
                state.queue.append(_claim(line))
    except ValueError as error:
        message = f"nonsense under a right checksum: {error}"
        raise DamagedError(message) from error
    if stored != name and name is not None:
        message = f"it is the record of the lock {stored}"
        raise DamagedError(message)
    return state, boot


def _note(line: str) -> str:
    text = decode_json(line, SIZE_MAX)
    if not isinstance(text, str):
        message = "a note that is no text"
        raise ValueError(message)  # noqa: TRY004 - as for all that is wrong in a record
    return text


def recorded_name(text: bytes) -> str:
    """Return the escaped name in a record that `decode` has accepted."""
    return text[_HEAD_SIZE:].split(b" ", 2)[1].decode("ascii")


def _claim(line: str, metadata: str = "") -> FileClaim:
    owner, client, ttl_us, *word = line.split(" ")
    if not _WORD.fullmatch(owner) or not _CLIENT.fullmatch(client) or len(word) > 1:
        message = "a claim with odd characters"
        raise ValueError(message)
    claim = FileClaim(owner, int(ttl_us) / 1e6, "" if client == "-" else client, metadata)
    if not word:
        return claim
    return claim._replace(mode="shared") if word[0] == "s" else claim._replace(mode="permit", limit=int(word[0]))


def _share(line: str) -> Share[FileClaim]:
    _, owner, client, until_us, token, slot, metadata = line.split(" ", 6)
    claim = _claim(f"{owner} {client} 0", "" if metadata == "-" else metadata)
    return Share(claim, int(until_us) / 1e6, int(token), None if slot == "-" else int(slot))


class RecordFile:
    """
    One open record.

    The last state is kept in memory, because parsing a record takes as long as all system calls of an operation.

    Attributes:
        fd: Descriptor, -1 when closed.
        mutex: Held during `update` and `close`.
        name: The lock.
        path: Of the file.
        boot: Boot id of this machine.
        look_at: When a reader must look at it again that nothing has woken.
        single_use: This client made it, and had not lately made one of the same name: it goes with the release.
    """

    __slots__ = (
        "_check_at",
        "_escaped",
        "_reserved",
        "_state",
        "_status",
        "_text",
        "boot",
        "fd",
        "look_at",
        "mutex",
        "name",
        "path",
        "single_use",
    )

    def __init__(self, fd: int, name: str, escaped: str, path: str, *, group: int | None) -> None:
        """Take over an open file."""
        status = os.fstat(fd)
        try:
            refuse_foreign(path, status, group=group)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd
        self.mutex = threading.Lock()
        self.name = name
        self.path = path
        self.boot = boot_id()
        self.look_at = 0.0
        self.single_use = False
        self._escaped = escaped
        self._check_at = 0.0
        self._status = status
        self._reserved = min(status.st_size, SIZE_MAX)
        self._text = b""  # the record that `_state` was read from or written as; empty if `_state` must not be used
        self._state: LockState[FileClaim] = LockState()

    def update(
        self,
        change: Callable[[LockState[FileClaim], float], T],
        now: float,
        load: Callable[[RecordFile, bytes, float, bool], tuple[LockState[FileClaim], bytes]],
        forced: bool = False,  # noqa: FBT001, FBT002 - handed on
        taking: bool = False,  # noqa: FBT001, FBT002 - faster than by its name
    ) -> T:
        """
        Read the record, call `change`, and write the record if that changed it: all under mutex and flock.

        The mutex is for the threads of this client, which share the descriptor and with it the flock.
        """
        with self.mutex:
            fd = self.fd
            if fd < 0:
                raise RemovedError  # closed by another thread, to open another record
            # The flock within the try: an interrupt may come in the instant in which it is granted.
            try:
                _flock(fd, _LOCK)
                if taking or now >= self._check_at:
                    self._check_link(now)
                text = _pread(fd, _READ_SIZE, 0)
                # If an interrupt comes from here on, the copy in memory may differ from the file.
                known, self._text = self._text, b""
                if known and text.startswith(known):
                    state = self._state
                else:
                    state, known = load(self, text, now, forced)
                result = change(state, now)
                text = encode(state, self._escaped, self.boot)
                if text != known:
                    self._write(text)
                self._state, self._text = state, text
                return result  # noqa: TRY300 - one place for all that happens under the flock
            except RemovedError:
                # The process that wrote REMOVED may have died before it removed the file.
                if is_at(self._status, self.path):
                    os.unlink(self.path)  # noqa: PTH108
                self.close()
                raise
            finally:
                if self.fd >= 0:
                    _flock(fd, _UNLOCK)

    def is_linked(self) -> bool:
        """Tell whether this is the record still: another program may have removed it."""
        return is_at(self._status, self.path)

    def _check_link(self, now: float) -> None:
        if not is_at(self._status, self.path):
            raise RemovedError
        self._check_at = now + LINK_CHECK_SECONDS

    def read(self, text: bytes = b"") -> tuple[LockState[FileClaim], str, bytes]:
        """Read and parse the record."""
        text = read_record(self.fd, text)
        state, boot = decode(text, self._escaped)
        return state, boot, text

    def replace(self, state: LockState[FileClaim]) -> bytes:
        """Write a state within `update`, to stay even if the rest of that fails; return the record."""
        text = encode(state, self._escaped, self.boot)
        self._write(text)
        return text

    def _write(self, text: bytes) -> None:
        if len(text) > self._reserved:
            # The disk may be full: find out before anything has changed.
            if len(text) > SIZE_MAX:
                message = (
                    f"{self.path} would need {len(text)} bytes, and a record has at most {SIZE_MAX}: too many hold the "
                    "lock beside one another, or wait for it. Give them shorter metadata, or use another backend"
                )
                raise BackendUnavailable(message)
            reserve(self.fd, self._reserved, len(text))
            self._reserved = min(os.fstat(self.fd).st_size, SIZE_MAX)
        if _pwrite(self.fd, text, 0) != len(text):
            # Only a limit on the size of files does that here. The record is damaged now, and will be repaired.
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self.path)

    def close(self) -> None:
        """Close the descriptor. Idempotent. Call it under `mutex`, or where no other thread can use the record."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def open_record(path: str) -> int:
    """Open a record file for reading and writing: not through a link, and without blocking if it is a pipe."""
    try:
        return os.open(path, _OPEN | _NO_ATIME)
    except PermissionError:
        return os.open(path, _OPEN)  # it belongs to another member of the group


def make_record(directory: Directory, path: str, escaped: str, unique: str) -> bool:
    """
    Make a record under another name and link it, complete, to its own: no process ever sees an empty one.

    Returns False if another process makes it at the same time.
    """
    hidden = f"{directory.path}/.new-{unique}"
    content = encode(LockState(), escaped, boot_id())
    try:
        fd = directory.create(hidden, content)
    except FileNotFoundError:
        directory.prepare()  # another program removed it while this client used it
        fd = directory.create(hidden, content)
    os.close(fd)
    try:
        os.link(hidden, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.EOPNOTSUPP}:
            raise
        message = f"{directory.path} is on a file system without hard links: name another directory"
        raise ConfigurationError(message) from error
    finally:
        unlink(hidden)
    return True


def read_record(fd: int, text: bytes = b"") -> bytes:
    """Read a record, without what may follow after its end."""
    text = text or _pread(fd, _READ_SIZE, 0)
    size = _size(text)
    return text[:size] if size <= len(text) else _pread(fd, size, 0)
