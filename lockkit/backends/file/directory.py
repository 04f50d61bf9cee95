"""
The directory of the file backend: its layout, its file system, and who may write there.

::

    DIRECTORY/seat%3A12%41.lock     the record of the lock seat:12A
    DIRECTORY/.new-…                a record being made
    DIRECTORY/clients/3f0c…         one file per client, flocked for its life (`lockkit.backends.file.client_file`)
"""

from __future__ import annotations

import errno
import hashlib
import os
import shlex
import stat
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lockkit.errors import ConfigurationError
from lockkit.file_systems import NETWORK_FILE_SYSTEMS, kind_of_file_system

__all__ = [
    "Directory",
    "Flaw",
    "boot_id",
    "find_flaw",
    "is_at",
    "record_file_prefix",
    "record_name",
    "reserve",
    "unlink",
]

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
    """
    Name this run of this kernel: what its monotonic clock and its flocks belong to.

    Raises:
        ConfigurationError: The operating system does not tell.
    """
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


class Flaw(NamedTuple):
    """Why a folder cannot be trusted: ``{path} {seen}``, and what to do about it."""

    path: str
    seen: str
    fix: str


def find_flaw(path: str, status: os.stat_result, *, group: bool, above: os.stat_result | None = None) -> Flaw | None:
    """
    Say why other users could remove or replace files in a folder; None if they cannot.

    Trusted are root, this user and, with `group`, the folder's group. In a folder below the directory of the locks, the
    owner of that directory is trusted too, and another member of the group only where no other user could have made the
    folder.

    Args:
        path: Of the folder.
        status: Of the folder. For one below the directory of the locks, from ``lstat``.
        group: The locks are shared with the group.
        above: Status of the directory of the locks, if the folder is below it.
    """
    mode, me = status.st_mode, os.geteuid()
    if not stat.S_ISDIR(mode):
        return Flaw(path, "is a symbolic link or a file, made by another program or user", f"remove {path}")
    name = shlex.quote(path)
    shared = group and (above is None or not above.st_mode & stat.S_IWOTH)
    owners = {0, me} | ({above.st_uid} if above is not None else set())
    if status.st_uid not in owners and not (shared and (me == 0 or status.st_gid in {os.getegid(), *os.getgroups()})):
        return Flaw(
            path,
            f"belongs to another user (uid {status.st_uid})",
            f"chown {me} {name}, or name a directory of your own",
        )
    writers = mode & (stat.S_IWGRP | stat.S_IWOTH) & ~(stat.S_IWGRP if group else 0)
    if not writers or mode & stat.S_ISVTX:
        return None
    if writers & stat.S_IWOTH:
        return Flaw(path, f"may be written to by anybody (mode {stat.S_IMODE(mode):04o})", f"chmod o-w {name}")
    fix = f"chmod g-w {name}, or say ?group=1 to share the locks"
    return Flaw(path, f"may be written to by its group (mode {stat.S_IMODE(mode):04o})", fix)


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

        Raises:
            OSError: It cannot be made.
            ConfigurationError: Other users may write to it or to its folder ``clients``, or it is on a network file
                system.
        """
        self._make(self.path, 0o2770 if self.group else 0o700)
        status = os.stat(self.path)  # noqa: PTH116
        self._refuse(find_flaw(self.path, status, group=self.group))
        _check_file_system(self.path, status.st_dev)
        self.gid = status.st_gid
        self._make(self.clients, stat.S_IMODE(status.st_mode))
        self._refuse(find_flaw(self.clients, os.lstat(self.clients), group=self.group, above=status))

    @staticmethod
    def _refuse(flaw: Flaw | None) -> None:
        if flaw is not None:
            message = f"{flaw.path} {flaw.seen}, so another user could remove locks that are held: {flaw.fix}"
            raise ConfigurationError(message)

    def _make(self, path: str, mode: int, *, parent_made: bool = False) -> None:
        parent = os.path.dirname(path)  # noqa: PTH120
        try:
            os.mkdir(path, 0o700)  # noqa: PTH102
        except FileNotFoundError as error:
            if parent_made and os.path.isdir(parent):  # noqa: PTH112
                if kind_of_file_system(os.stat(parent).st_dev) != "proc":  # noqa: PTH116
                    raise  # somebody removes it and makes it again, which may end
                message = f"{path} cannot be made, since {parent} takes no directories: name another directory"
                raise ConfigurationError(message) from error
            # Another process may have made the parent since. Parents are 0700 too, as the XDG specification has it for
            # the state directory.
            self._make(parent, 0o700)
            self._make(path, mode, parent_made=True)
        except FileExistsError:
            if not os.path.isdir(path):  # noqa: PTH112
                raise
        except PermissionError as error:
            message = (
                f"{path} cannot be made, since this user may not write to {parent}: name another directory, in the URL "
                "or with LOCKKIT_STATE_DIR"
            )
            raise ConfigurationError(message) from error
        else:
            os.chmod(path, mode)  # noqa: PTH101 - past the umask

    def create(self, path: str, content: bytes) -> int:
        """
        Make a file that must not exist yet, with its content on reserved blocks; return its descriptor.

        Raises:
            OSError: Nothing is left of it.
        """
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
    """
    Grow a file to whole pages and reserve them, so that a later write into them does not need free disk space.

    Args:
        fd: The file.
        size: Its size, bytes.
        wanted: What it must hold, bytes.

    Raises:
        OSError: The disk is full. The content is as it was.
    """
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
