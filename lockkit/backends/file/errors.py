"""Turns errors of the operating system into lockkit's, with what to do about them."""

from __future__ import annotations

import errno

from lockkit.errors import BackendUnavailable, ConfigurationError, LockError

# Retrying does not help here.
_CONFIGURATION = {
    errno.EACCES: "may not be used by this user: fix its owner and mode, or share it with ?group=1",
    errno.EPERM: "may not be used by this user: fix its owner and mode, or share it with ?group=1",
    errno.EROFS: "is on a read-only file system: name another directory",
    errno.EISDIR: "is a directory: remove it",
    errno.ENOTDIR: "has something on its path that is not a directory: remove that, or name another directory",
    errno.EEXIST: "is not a directory: remove it, or name another directory",
    errno.ELOOP: "is a symbolic link: remove it",
    errno.ENXIO: "is not a regular file: remove it",
    errno.ESPIPE: "is not a regular file: remove it",
    errno.ENAMETOOLONG: "is too long for this file system: name a directory with a shorter path",
}
_UNAVAILABLE = {
    errno.ENOSPC: "could not be written, the file system is full: free some space",
    errno.EDQUOT: "could not be written, the disk quota is used up: free some space",
    errno.EFBIG: "could not be written, this process may not write files of that size (ulimit -f): raise the limit",
    errno.EMFILE: "could not be opened, this process has too many open files: raise its limit (ulimit -n)",
    errno.ENFILE: "could not be opened, this machine has too many open files",
}


def explain(error: OSError, path: str) -> LockError:
    """Turn an error of the operating system into one of lockkit's."""
    where = error.filename if isinstance(error.filename, str) else path
    code = error.errno or 0
    if code in _CONFIGURATION:
        return ConfigurationError(f"{where} {_CONFIGURATION[code]} ({error.strerror})")
    said = _UNAVAILABLE.get(code, "could not be read or written")
    return BackendUnavailable(f"{where} {said} ({error.strerror})")
