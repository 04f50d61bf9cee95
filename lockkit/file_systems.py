"""On what kind of file system something is: locks in files do not work on each."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["NETWORK_FILE_SYSTEMS", "kind_of_file_system"]

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
