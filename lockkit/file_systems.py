"""Finds out the kind of a file system, and which users could replace a file or directory."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import shlex
import stat
from pathlib import Path
from typing import NamedTuple

__all__ = ["NETWORK_FILE_SYSTEMS", "Flaw", "find_flaw", "find_flaw_on_the_way", "kind_of_file_system", "shared_group"]

LINKS_MAX = 40  # as path_resolution(7)

NETWORK_FILE_SYSTEMS = frozenset({
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "ocfs2"),
    *("gfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.juicefs", "fuse.mfs"),
    *("fuse.s3fs", "fuse.gcsfuse", "fuse.rclone"),
})  # fmt: skip


def kind_of_file_system(device: int) -> str:
    """Return the type of the file system of a device (``st_dev``); empty where the system does not say."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError:
        return ""  # macOS
    return kind_in(mounts, device)


def kind_in(mounts: str, device: int) -> str:
    """
    Find the type of a mounted file system; empty if it is not in the list.

    Args:
        mounts: As in proc_pid_mountinfo(5): ``id parent major:minor root mountpoint options [fields] - type source …``.
        device: As in ``st_dev``.
    """
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        mount, _, rest = line.partition(" - ")
        if mount.split(" ", 3)[2] == wanted:
            return rest.partition(" ")[0]
    return ""


class Flaw(NamedTuple):
    """Why a path cannot be trusted: ``{path} {seen}``, and what to do about it."""

    path: str
    seen: str
    fix: str


def find_flaw(
    path: str, status: os.stat_result, *, group: int | None = None, owners: frozenset[int] = frozenset()
) -> Flaw | None:
    """
    Say why other users could change a file, or replace files in a directory; None if they cannot.

    Trusted are root, this user and, with `group`, the members of that group: then a directory that everybody may write
    to is refused even if it is sticky.

    Args:
        path: Of the file or directory.
        status: From ``lstat`` or ``fstat``: not of what a link points to.
        group: A trusted group: see `shared_group`. What belongs to another one is judged as without it.
        owners: Further users that are trusted.
    """
    mode, me, name = status.st_mode, os.geteuid(), shlex.quote(path)
    shared = status.st_gid == group
    if status.st_uid not in {0, me} | owners and not shared:
        return Flaw(path, f"belongs to another user (uid {status.st_uid})", f"chown {me} {name}, or name another path")
    if stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX and not shared):
        return None
    writers = mode & (stat.S_IWOTH if shared or _is_private(status.st_gid) else stat.S_IWOTH | stat.S_IWGRP)
    if not writers or os.statvfs(path).f_flag & os.ST_RDONLY:
        return None  # Kubernetes mounts a ConfigMap read-only, with mode 0777
    who, bits = ("anybody", "o") if writers & stat.S_IWOTH else ("its group", "")
    bits = f"g{bits}" if writers & stat.S_IWGRP else bits
    return Flaw(path, f"may be written to by {who} (mode {stat.S_IMODE(mode):04o})", f"chmod {bits}-w {name}")


def shared_group(status: os.stat_result) -> int | None:
    """
    Give the group to trust in a directory whose user asked to share it; None: not its group.

    Another user can make a directory of any of his groups. So it counts for root only if root made the directory or is
    in the group.
    """
    trusted = status.st_uid in {0, os.geteuid()} or status.st_gid in {os.getegid(), *os.getgroups()}
    return status.st_gid if trusted else None


def _is_private(gid: int) -> bool:
    """Tell whether a group has only this user: distributions give each user one, and a umask that lets it write."""
    me = os.geteuid()
    if me == 0:
        return False
    try:
        user, group = pwd.getpwuid(me), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def find_flaw_on_the_way(path: str, *, group: bool = False) -> Flaw | None:
    """
    Say why other users could replace a path, or something on the way to it; None if they cannot.

    As ``StrictModes`` of sshd_config(5), but for each symbolic link on the way too, since its owner decides what the
    path means. What is missing is not examined.

    Args:
        path: Absolute.
        group: Share the path, and the directory that has it, with the group of that directory. Not what is above: who
            could replace the directory would choose its group.

    Raises:
        OSError: A part of the path cannot be examined, or the links on the way form a circle.
    """
    here, links, gid = "/", 0, None
    parts = list(reversed(Path(path).parts[1:]))
    while True:
        try:
            status = os.lstat(here)
        except FileNotFoundError:
            return None
        if group and len(parts) == 1 and stat.S_ISDIR(status.st_mode):
            gid = shared_group(status)
        flaw = find_flaw(here, status, group=gid if len(parts) <= 1 else None)
        if flaw is not None:
            return flaw
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > LINKS_MAX:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = Path(os.readlink(here))  # noqa: PTH115 - a str names it below
            parts += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            here = "/" if target.is_absolute() else os.path.dirname(here)  # noqa: PTH120
        if not parts:
            return None
        part = parts.pop()
        here = os.path.dirname(here) if part == ".." else os.path.join(here, part)  # noqa: PTH118, PTH120
