"""
The directory of the file backend: its layout, its file system, and who may write there.

::

    DIRECTORY/seat%3A12%41.lock     the record of the lock seat:12A
    DIRECTORY/.new-…                a record being made
    DIRECTORY/.lockkit              whether lockkit made the directory, and the largest token of the removed records
    DIRECTORY/clients/3f0c…         one file per client, flocked for its life (`lockkit.backends.file.client_file`)

A file is removed only if its name and its content are lockkit's, read from one descriptor: the directory may be one
that a user has for other things too.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shlex
import stat
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from lockkit.errors import ConfigurationError
from lockkit.file_systems import (
    NETWORK_FILE_SYSTEMS,
    Flaw,
    find_flaw,
    find_flaw_on_the_way,
    kind_of_file_system,
)

MARKER = ".lockkit"
_MARKER = re.compile(rb"lockkit-directory 1 made ([01]) token ([0-9]{19})\n")
_LINUX = sys.platform == "linux"
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789._:-")
_NAME_MAX = 180
"""Longest record name in bytes: NAME_MAX is 255 on all file systems in use, except for 143 on eCryptfs."""
_HEAD_SIZE = _NAME_MAX - 65
"""What a longer one keeps of the lock's name, before ``~`` and its SHA-256."""


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


def refuse_foreign(path: str, status: os.stat_result, *, group: int | None) -> None:
    """Refuse a file that another user could change; `group` is trusted."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), path)
    flaw = find_flaw(path, status, group=group)
    if flaw is not None:
        message = (
            f"{path} {flaw.seen}, so another user could change it while the lock is held: {flaw.fix}, or share the "
            "locks with a group by ?group=1"
        )
        raise ConfigurationError(message)


class Directory:
    """
    One directory of locks.

    Attributes:
        path: Absolute.
        clients: The directory of the client files.
        group: Files are shared with the group of the directory.
    """

    def __init__(self, path: str, *, group: bool) -> None:
        """Keep the path; `prepare` makes the directory."""
        self.path = path
        self.clients = os.path.join(path, "clients")  # noqa: PTH118 - str: these are joined on the hot path
        self.group = group
        self.gid = -1

    def prepare(self) -> None:
        """
        Make the directory if it is missing, and check that it can be trusted.

        ConfigurationError: Other users may write to it or to its folder ``clients``, or it is on a network file
        system.
        """
        self._refuse_if_shared()
        made = _make(self.path, 0o2770 if self.group else 0o700)
        status = os.lstat(self.path)
        _check_file_system(self.path, status.st_dev)
        self.gid = status.st_gid
        self._refuse_if_shared()
        if made:
            self._make_marker(made=True)
        _make(self.clients, stat.S_IMODE(status.st_mode), gid=self.gid if self.group else -1)
        self._refuse_if_shared()

    @property
    def trusted(self) -> int | None:
        """The group whose members may have made the files."""
        return self.gid if self.group else None

    def _refuse_if_shared(self) -> None:
        flaw = find_directory_flaw(self.path, group=self.group)
        if flaw is not None:
            message = f"{flaw.path} {flaw.seen}, so another user could replace or remove locks: {flaw.fix}"
            raise ConfigurationError(message)

    # -- the marker ------------------------------------------------------------------------------------------------

    @property
    def made(self) -> bool:
        """Whether lockkit made the directory."""
        return self._read_marker()[0]

    @property
    def token_floor(self) -> int:
        """The largest token of the records that were removed; 0 if none was, or if that is not known."""
        return self._read_marker()[1]

    def raise_token_floor(self, token: int) -> None:
        """Have the records that are made from now on begin above a token."""
        try:
            fd = self._open_marker(os.O_RDWR)
        except FileNotFoundError:
            self._make_marker(made=False)
            fd = self._open_marker(os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_ours(os.pread(fd, 100, 0)):
                message = f"{self.path}/{MARKER} was made by another program"
                raise ConfigurationError(message)
            made, floor = _parse_marker(fd)
            if token > floor:
                os.pwrite(fd, _marker(made, token), 0)
        finally:
            os.close(fd)

    def _read_marker(self) -> tuple[bool, int]:
        try:
            fd = self._open_marker(os.O_RDONLY)
        except OSError:
            return False, 0
        try:
            return _parse_marker(fd)
        finally:
            os.close(fd)

    def _open_marker(self, flags: int) -> int:
        path = f"{self.path}/{MARKER}"
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            refuse_foreign(path, os.fstat(fd), group=self.trusted)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _make_marker(self, *, made: bool) -> None:
        with suppress(FileExistsError):  # another client was faster
            os.close(self.create(f"{self.path}/{MARKER}", _marker(made, 0)))

    # -- files -----------------------------------------------------------------------------------------------------

    def create(self, path: str, content: bytes) -> int:
        """Make a file that must not exist yet, with its content on reserved blocks; return its descriptor."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if self.group:
                if os.fstat(fd).st_gid != self.gid:
                    os.fchown(fd, -1, self.gid)
                os.fchmod(fd, 0o660)
            reserve(fd, 0, len(content))
            os.pwrite(fd, content, 0)
        except BaseException:
            os.close(fd)
            unlink(path)
            raise
        return fd


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


def reserve(fd: int, size: int, wanted: int) -> None:
    """Grow a file to whole pages and reserve them, so that a later write into them does not need free disk space."""
    target = -(-wanted // 4096) * 4096
    if target <= size:
        return
    if sys.platform == "linux":
        try:
            os.posix_fallocate(fd, 0, target)
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:  # musl does not emulate it where it is missing
                raise
        else:
            return
    os.pwrite(fd, b"\n" * (target - size), size)


def _check_file_system(path: str, device: int) -> None:
    """Refuse network file systems: the clock and the boot id of a record mean nothing on another machine."""
    kind = kind_of_file_system(device)  # empty on macOS; the documentation says that the directory must be local
    if kind in NETWORK_FILE_SYSTEMS:
        message = (
            f"{path} is on a network file system ({kind}), where other machines would not see these locks: "
            "name a local directory, or use a backend for several machines, such as redis:// or postgresql://"
        )
        raise ConfigurationError(message)
