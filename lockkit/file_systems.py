"""On what kind of file system something is (locks in files do not work on each), and which users may write there."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

__all__ = ["NETWORK_FILE_SYSTEMS", "Flaw", "flaw_above", "flaw_of", "kind_of_file_system"]

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
    """How another user could write to a file or directory: ``{path} {seen}``, and what to do about it."""

    path: str
    seen: str
    fix: str


def flaw_of(path: str, status: os.stat_result, *, owners: Collection[int] = ()) -> Flaw | None:
    """
    Say how other users could write to a file or directory; None if only root, this user and `owners` can.

    In a sticky directory, such as ``/tmp``, nobody else can replace what root or this user has made.

    Args:
        path: For the message.
        status: Of the file or directory; of an open file from ``fstat``, so that nobody can swap it in between.
        owners: User ids that are trusted too.
    """
    mode, name = status.st_mode, shlex.quote(path)
    if status.st_uid not in {0, os.geteuid(), *owners}:
        return Flaw(path, f"belongs to another user (uid {status.st_uid})", f"chown {os.geteuid()} {name}")
    writers = mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not writers or stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return None
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return None  # Kubernetes mounts a ConfigMap read-only, with mode 0777
    if writers & stat.S_IWOTH:
        return Flaw(path, f"may be written to by anybody (mode {stat.S_IMODE(mode):04o})", f"chmod go-w {name}")
    return Flaw(path, f"may be written to by its group (mode {stat.S_IMODE(mode):04o})", f"chmod g-w {name}")


def flaw_above(path: str) -> Flaw | None:
    """
    Say how other users could replace an existing file or directory by one of their own; None if they cannot.

    Each directory up to the root is checked, as by StrictModes of sshd_config(5). If the path is a symbolic link, its
    owner and the directories of its target are checked too.

    Raises:
        OSError: One of them cannot be examined.
    """
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode) and (flaw := flaw_of(path, link)) is not None:
        return flaw
    for directory in dict.fromkeys((*Path(path).parents, *Path(os.path.realpath(path)).parents)):
        if (flaw := flaw_of(str(directory), directory.stat())) is not None:
            return flaw
    return None
