"""
Becomes another program that ends when the process that started it ends.

Run as a script between fork and the server: ``_launch.py PARENT UID GID PROGRAM ARG...``.
A script rather than ``preexec_fn``, because that one runs Python in a forked copy of a
process with threads, where any lock may be held for ever by a thread that was not copied.
It also drops root here rather than through ``Popen(user=...)``: the unprivileged user may
not be allowed to run this interpreter (one below ``/root``, say), and changing the user
clears the death signal (prctl(2), PR_SET_PDEATHSIG), so the order matters.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def drop_root(uid: int, gid: int) -> None:
    """Goes on as another user, without root's groups."""
    os.setgroups([gid])
    os.setgid(gid)
    os.setuid(uid)


def die_with(parent: int) -> None:
    """Asks the kernel for SIGKILL when the thread that started us ends (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have died before the request was in force: then no signal comes.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main(parent: str, uid: str, gid: str, *command: str) -> None:
    """Sets up this process and replaces it by `command`."""
    # Python ignores SIGPIPE, and an ignored signal stays ignored across exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if int(uid) >= 0:
        drop_root(int(uid), int(gid))
    die_with(int(parent))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
