"""
The directory of the file backend: its layout, its file system, who may write there, and which clients live.

::

    DIRECTORY/seat%3A12%41.lock     the record of the lock seat:12A
    DIRECTORY/.new-…                a record being made
    DIRECTORY/.lockkit              whether lockkit made the directory, and the largest token of the removed records
    DIRECTORY/clients/3f0c…         one file per client, flocked for its life

Each client keeps its file ``clients/ID`` open for writing and exclusively flocked as long as it lives.
The kernel drops the flock when the process ends, however it ends. So a client that gets a shared flock on another
client's file knows that the other has ended. An id is random and never reused, so a missing file also means that its
client has ended.

A flock (flock(2)) belongs to the open file: a forked child has a copy, and must close it at once. Otherwise the parent
would seem to live as long as the child.

The file holds, as text, the client's process id (for people) and the largest ttl that it ever asked for (for
`Directory.live_ttl_max`).

A file is removed only if its name and its content are lockkit's, read from one descriptor: the directory may be one
that a user has for other things too.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import shlex
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.file_systems import (
    NETWORK_FILE_SYSTEMS,
    Flaw,
    find_flaw,
    find_flaw_on_the_way,
    kind_of_file_system,
)
from lockkit.runtime import Runtime
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")

MARKER = ".lockkit"
_MARKER = re.compile(rb"lockkit-directory 1 made ([01]) token ([0-9]{19})\n")
CLIENT_NAME = re.compile("[0-9a-f]{1,16}")
CLIENT_CONTENT = re.compile(rb"lockkit-client 1 pid ([0-9]+) ttl_max_us ([0-9]{16})\n")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Without it, the next read after each write would write its time back to the inode.
_NO_ATIME = getattr(os, "O_NOATIME", 0)

_LINUX = sys.platform == "linux"  # mypy would take what follows on other systems for unreachable
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789._:-")
_NAME_MAX = 180
"""Longest record name in bytes: NAME_MAX is 255 on all file systems in use, except for 143 on eCryptfs."""
_HEAD_SIZE = _NAME_MAX - 65
"""What a longer one keeps of the lock's name, before ``~`` and its SHA-256."""

CHECK_SECONDS = 1.0
"""How often a client that holds or waits checks that its file is still there. Without it, the other clients assume that
this one has ended, take its locks, and pass over its waiters until the next check."""

TOUCH_SECONDS = 3600.0
"""How often a client that renews marks its file as in use. Cleaners such as systemd-tmpfiles(8) remove from /tmp what
was not touched for ten days, and then the other clients would assume that this one has ended."""

DETACHED = "0"
"""Client in the claim of a lock that stays held although its client may end: until its ttl, or until it is taken over.
No client has this id, which are random."""


def record_name(name: str) -> tuple[str, str]:
    """
    Turn a lock name into the escaped name that its record contains, and the name of the file.

    Every byte but ``a-z 0-9 . _ : -`` is percent-encoded, also capitals and accents: some file systems fold case and
    normalise Unicode, and two locks would be one. Long names end in their SHA-256 instead; ``~`` occurs in no other.
    """
    escaped = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in name.encode())
    if escaped.startswith("."):
        escaped = f"%2E{escaped[1:]}"
    if len(escaped) <= _NAME_MAX:
        return escaped, f"{escaped}.lock"
    return escaped, f"{escaped[:_HEAD_SIZE]}~{hashlib.sha256(name.encode()).hexdigest()}.lock"


def record_file_prefix(prefix: str) -> str:
    """Return the beginning that the record files of all names with a prefix have; files of others may have it too."""
    return record_name(prefix)[0][:_HEAD_SIZE]


@cache
def boot_id() -> str:
    """Name this run of this kernel: what its monotonic clock and its flocks belong to."""
    try:
        if _LINUX:
            return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip() + _time_namespace()
        return _sysctl(b"kern.bootsessionuuid")
    except (OSError, AttributeError) as error:
        message = (
            "the file backend needs the boot id of this machine (on Linux: a mounted /proc), and could not read it"
        )
        raise ConfigurationError(message) from error


def _time_namespace() -> str:
    """Mark a time namespace whose clock differs from the machine's (time_namespaces(7))."""
    try:
        text = Path("/proc/self/timens_offsets").read_text("ascii")
    except FileNotFoundError:  # Linux before 5.6
        return ""
    offset = next((line.split()[1:] for line in text.splitlines() if line.startswith("boottime")), [])
    return "" if set(offset) <= {"0"} else f"+{'.'.join(offset)}"


def _sysctl(name: bytes) -> str:
    import ctypes  # noqa: PLC0415 - macOS only

    size = ctypes.c_size_t(64)
    buffer = ctypes.create_string_buffer(size.value)
    if ctypes.CDLL(None, use_errno=True).sysctlbyname(name, buffer, ctypes.byref(size), None, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return buffer.value.decode("ascii")


def find_directory_flaw(path: str, *, group: bool) -> Flaw | None:
    """Say why a directory of locks cannot be trusted; None if it can. What is missing is not examined."""
    clients = f"{path}/clients"
    for folder in (path, clients):
        if os.path.islink(folder):  # noqa: PTH114
            return Flaw(folder, "is a symbolic link", "name the directory that it points to, or remove it")
    flaw = find_flaw_on_the_way(clients, group=group)
    if flaw is not None and flaw.path in {path, clients} and flaw.fix == f"chmod g-w {shlex.quote(flaw.path)}":
        return flaw._replace(fix=f"{flaw.fix}, or say ?group=1 to share the locks")
    return flaw


class Directory:
    """One directory of locks, and one client's file there: made by the first `check`, again after it was removed."""

    def __init__(self, runtime: Runtime, path: str, *, group: bool, on_removed: Callable[[], None]) -> None:
        """Make nothing yet."""
        self.path = path  # absolute
        self.clients = f"{path}/clients"  # the directory of the client files
        self.group = group  # files are shared with the group of the directory
        self._gid = -1
        self._runtime = runtime
        self._on_removed = on_removed
        self._closed = False
        self._ttl_max = self._written_at = 0.0
        self.fd = -1  # of the file, -1 without one
        self.forget()

    def prepare(self) -> None:
        """
        Make the directory if it is missing, and check that it can be trusted.

        ConfigurationError: Other users may write to it or to its folder ``clients``, or it is on a network file
        system.
        """
        self._refuse_if_shared()
        made = _make(self.path, 0o2770 if self.group else 0o700)
        status = os.lstat(self.path)
        kind = kind_of_file_system(status.st_dev)  # empty on macOS; the documentation says that it must be local
        if kind in NETWORK_FILE_SYSTEMS:
            # The clock and the boot id of a record mean nothing on another machine.
            message = (
                f"{self.path} is on a network file system ({kind}), where other machines would not see these locks: "
                "name a local directory, or use a backend for several machines, such as redis:// or postgresql://"
            )
            raise ConfigurationError(message)
        self._gid = status.st_gid
        self._refuse_if_shared()
        if made:
            self._make_marker(made=True)
        _make(self.clients, stat.S_IMODE(status.st_mode), gid=self._gid if self.group else -1)
        self._refuse_if_shared()

    def _refuse_if_shared(self) -> None:
        flaw = find_directory_flaw(self.path, group=self.group)
        if flaw is not None:
            message = f"{flaw.path} {flaw.seen}, so another user could replace or remove locks: {flaw.fix}"
            raise ConfigurationError(message)

    # -- files -----------------------------------------------------------------------------------------------------

    def create(self, path: str, content: bytes) -> int:
        """Make a file that must not exist yet, with its content; return its descriptor."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if self.group:
                if os.fstat(fd).st_gid != self._gid:
                    os.fchown(fd, -1, self._gid)
                os.fchmod(fd, 0o660)
            write_all(fd, content, 0)
        except BaseException:
            os.close(fd)
            unlink(path)
            raise
        return fd

    def open(self, path: str, flags: int = os.O_RDWR) -> tuple[int, os.stat_result]:
        """Open a file, but none that another user could change."""
        fd = open_file(path, flags)
        try:
            status = os.fstat(fd)
            self._refuse_foreign(path, status)
        except BaseException:
            os.close(fd)
            raise
        return fd, status

    def _refuse_foreign(self, path: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), path)
        flaw = find_flaw(path, status, group=self._gid if self.group else None)
        if flaw is not None:
            message = (
                f"{path} {flaw.seen}, so another user could change it while the lock is held: {flaw.fix}, or share the "
                "locks with a group by ?group=1"
            )
            raise ConfigurationError(message)

    # -- the marker ------------------------------------------------------------------------------------------------

    def read_marker(self) -> tuple[bool, int]:
        """Return whether lockkit made the directory, and the largest token of the records that were removed."""
        try:
            fd, _ = self.open(f"{self.path}/{MARKER}", os.O_RDONLY)
        except OSError:
            return False, 0
        try:
            return _parse_marker(fd)
        finally:
            os.close(fd)

    def raise_token_floor(self, token: int) -> None:
        """Have the records that are made from now on begin above a token."""
        path = f"{self.path}/{MARKER}"
        if not os.path.lexists(path):
            self._make_marker(made=False)
        fd, _ = self.open(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_ours(os.pread(fd, 100, 0)):
                raise ConfigurationError(f"{path} was made by another program")
            made, floor = _parse_marker(fd)
            if token > floor:
                os.pwrite(fd, _marker(made, token), 0)
        finally:
            os.close(fd)

    def _make_marker(self, *, made: bool) -> None:
        with suppress(FileExistsError):  # another client was faster
            os.close(self.create(f"{self.path}/{MARKER}", _marker(made, 0)))

    # -- the file of this client -----------------------------------------------------------------------------------

    def check(self, now: Instant) -> None:
        """Make the file if it is missing."""
        former, removed = -1, ""
        with self._mutex:
            if self._closed:
                raise BackendUnavailable("this client is closed: connect again")
            if self.fd < 0 or not is_at(os.fstat(self.fd), self.client_path):
                # What it holds is free for others from the removal on, unless it renews first.
                former, removed = self.fd, self.client_path
                self._make_client_file()
            self.check_at = now + CHECK_SECONDS
        if former >= 0:
            log.warning("%s was removed; locks that were held may be lost", removed)
            # Not under the mutex: this takes those of records, and an operation on a record calls `allow_ttl`.
            self._on_removed()
            os.close(former)

    def check_soon(self) -> None:
        """Have the next operation call `check`."""
        self.check_at = 0.0

    def _make_client_file(self) -> None:
        self.prepare()
        client_id = self._runtime.owner()[:16]
        path = f"{self.clients}/{client_id}"
        # Flocked before it gets its name: a client that sees it without its flock would remove it.
        hidden = f"{self.clients}/.{client_id}"
        fd = self.create(hidden, self._content())
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(hidden, path)  # noqa: PTH104
        except BaseException:
            os.close(fd)
            unlink(hidden)  # Ctrl-C may come when it has its name
            raise
        self.fd, self.client_id, self.client_path = fd, client_id, path

    def _content(self) -> bytes:
        return b"lockkit-client 1 pid %d ttl_max_us %016d\n" % (os.getpid(), -int(-self._ttl_max * 1e6 // 1))

    def allow_ttl(self, ttl: Seconds, now: Instant) -> None:
        """
        Write a ttl down before any record holds it: a client that finds a damaged record waits for the largest.

        This also keeps cleaners away from the file (a change of its attributes would wake this client's own waiters).
        """
        if ttl > self._ttl_max or now >= self._written_at + TOUCH_SECONDS:
            with self._mutex:
                self._ttl_max = max(ttl, self._ttl_max)
                os.pwrite(self.fd, self._content(), 0)
                self._written_at = now

    def refuse(self) -> None:
        """Have operations that begin from now on fail. Those that are under way still need the file, until `close`."""
        self._closed = True
        self.check_soon()

    def close(self) -> None:
        """End this client for good: the locks that it holds are free."""
        self.refuse()
        if self.fd >= 0:
            unlink(self.client_path)
        self.forget()

    def forget(self) -> None:
        """Close the descriptor but leave the file; the next `check` makes another one. For a forked child."""
        self._mutex = threading.Lock()  # a real one, also under asyncio: it is never held across an await
        fd, self.fd = self.fd, -1
        self.client_id = ""  # random, hexadecimal; another one each time that the file is made; empty without a file
        self.client_path = ""  # of the file
        self.check_at = 0.0  # when the next `check` is due, on the runtime's clock
        self._ttl_max = self._written_at = 0.0
        if fd >= 0:
            os.close(fd)

    # -- other clients ---------------------------------------------------------------------------------------------

    def has_ended(self, client_id: str) -> bool:
        """Tell whether the client of a claim has ended; removes its file if so."""
        return client_id not in {"", DETACHED, self.client_id} and self._content_if_alive(client_id) is None

    def _content_if_alive(self, client_id: str) -> bytes | None:
        path = f"{self.clients}/{client_id}"
        try:
            fd = os.open(path, _READ)
        except FileNotFoundError:
            return None
        content = b""
        try:
            content = os.pread(fd, 100, 0)
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            ours = CLIENT_CONTENT.match(content) and is_at(os.fstat(fd), path)
        except BlockingIOError:
            return content
        finally:
            os.close(fd)
        if ours:
            unlink(path)  # another client may be faster
        return None

    def notify(self, client_id: str) -> None:
        """Wake the waiters of a client: one system call. No error if it has ended."""
        with suppress(FileNotFoundError):  # the kernel has notified the clients that watch it
            os.utime(f"{self.clients}/{client_id}")

    def live_ttl_max(self) -> Seconds | None:
        """Find the largest ttl that any live client ever asked for; None if one does not tell."""
        largest = 0.0
        for client_id in os.listdir(self.clients):  # noqa: PTH208
            # A client whose file has a dot before that name is just connecting and has no lock yet.
            content = self._content_if_alive(client_id) if CLIENT_NAME.fullmatch(client_id) else None
            if content is not None:
                found = CLIENT_CONTENT.match(content)
                if found is None:
                    return None
                largest = max(largest, int(found[2]) / 1e6)
        return largest


def _make(path: str, mode: int, *, gid: int = -1) -> bool:
    """Make a directory of a group (-1: of the user's), and what is missing above it; return whether it was missing."""
    try:
        # Parents are 0700 too, as the XDG specification has it for the state directory.
        for parent in reversed(Path(path).parents):
            if not parent.is_dir():
                with suppress(FileExistsError):  # another process was faster
                    os.mkdir(parent, 0o700)  # noqa: PTH102
        os.mkdir(path, 0o700)  # noqa: PTH102
    except FileExistsError:
        if not os.path.isdir(path):  # noqa: PTH112
            raise
        return False
    except (FileNotFoundError, PermissionError) as error:
        message = (
            f"{error.filename} cannot be made in {Path(error.filename).parent} ({error.strerror}): "
            "name another directory, in the URL or with LOCKKIT_STATE_DIR"
        )
        raise ConfigurationError(message) from error
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchown(fd, -1, gid)
        os.fchmod(fd, mode)  # past the umask; last, since a change of the group clears setgid
    finally:
        os.close(fd)
    return True


def _marker(made: bool, token: int) -> bytes:  # noqa: FBT001
    return b"lockkit-directory 1 made %d token %019d\n" % (made, token)


def _parse_marker(fd: int) -> tuple[bool, int]:
    """Return whether lockkit made the directory, and the token; False and 0 if the marker was damaged."""
    found = _MARKER.match(os.pread(fd, 100, 0))
    return (False, 0) if found is None else (found[1] == b"1", int(found[2]))


def is_ours(text: bytes) -> bool:
    """Tell from its beginning whether lockkit made a file; it was killed before it wrote anything if that is empty."""
    return text.startswith(b"lockkit-") or not text.strip(b"\0\n")


def open_file(path: str, flags: int = os.O_RDWR) -> int:
    """Open a file: not through a link, and without blocking if it is a pipe."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags | _NO_ATIME)
    except PermissionError:
        return os.open(path, flags)  # it belongs to another member of the group


def unlink(path: str) -> None:
    """Remove a file. No error, which could hide Ctrl-C, if it is gone or another user's in a sticky directory."""
    with suppress(FileNotFoundError, PermissionError):
        os.unlink(path)  # noqa: PTH108


def is_at(status: os.stat_result, path: str) -> bool:
    """
    Tell whether an open file, from its ``fstat``, is the one that has this name now.

    The number of its names does not tell that: a process that was killed while it made a record leaves a second one.
    """
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    return there.st_ino == status.st_ino and there.st_dev == status.st_dev


def write_all(fd: int, content: bytes, start: int) -> None:
    """Write into a file. After a part, as on a full disk, the next call raises the reason."""
    done = 0
    while done < len(content):
        done += os.pwrite(fd, content[done:], start + done)
