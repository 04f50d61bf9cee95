"""Installs missing servers with apt-get, on Debian and its children, as root."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockkit_tools.servers.errors import ServerMissing
from lockkit_tools.servers.kinds import Kind
from lockkit_tools.servers.temporary import shared_directory

# Packages ask this program before they start a service; status 101 forbids it.
POLICY = Path("/usr/sbin/policy-rc.d")
FORBID = "#!/bin/sh\n# lockkit installs servers for tests; they must not run as services.\nexit 101\n"

# Somebody else may be using apt-get; it waits for them that long, seconds.
LOCK_TIMEOUT = 600


def can_install() -> bool:
    """Whether this is a Debian (or Ubuntu) where we are root."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(kinds: Sequence[Kind], *, tell: Callable[[str], None]) -> None:
    """Installs what the kinds need and is not here yet."""
    if not any(kind.missing() for kind in kinds):
        return
    with _one_at_a_time():
        # Another process may have installed it while we waited.
        _install_missing([kind for kind in kinds if kind.missing()], tell)


def _install_missing(lacking: Sequence[Kind], tell: Callable[[str], None]) -> None:
    if not lacking:
        return
    if bodiless := [kind for kind in lacking if not kind.packages]:
        raise ServerMissing("; ".join(f"{kind.title} cannot be installed; set {kind.variable}" for kind in bodiless))
    packages = sorted({package for kind in lacking for package in kind.packages})
    what = "; ".join(f"{kind.name} needs {', '.join(kind.missing())}" for kind in lacking)
    if not can_install():
        raise ServerMissing(
            f"{what}: not on this machine, and only root on Debian can install it from here. "
            f"Install it yourself (Debian's packages: {' '.join(packages)}), or set "
            f"{' or '.join(kind.variable for kind in lacking)}"
        )
    with _services_forbidden():
        _apt_install(packages, tell)
    tell(f"installed {' '.join(packages)}")
    if still := [kind for kind in lacking if kind.missing()]:
        names = "; ".join(f"{kind.name}: {', '.join(kind.missing())}" for kind in still)
        raise ServerMissing(f"installed {' '.join(packages)}, but still missing: {names}")


def _apt_install(packages: Sequence[str], tell: Callable[[str], None]) -> None:
    """Installs packages; fetches the package lists only if it fails with those that are there."""
    command = ["install", "--yes", "--no-install-recommends", *packages]
    if _apt_get(*command).returncode == 0:
        return
    tell("apt-get update")
    _apt_get("update")
    done = _apt_get(*command)
    if done.returncode != 0:
        raise ServerMissing(f"apt-get could not install {' '.join(packages)}:\n{done.stdout}")


def _apt_get(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["apt-get", "--quiet", "-o", f"DPkg::Lock::Timeout={LOCK_TIMEOUT}", *arguments],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
    )


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """
    Lets one process of this machine install, the others wait.

    apt-get's own lock is not enough: two that both move the administrator's policy away
    could restore each other's instead of it.
    """
    with (shared_directory("install") / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _services_forbidden() -> Iterator[None]:
    """
    Keeps packages from starting services while the context lasts.

    The administrator's own policy, if there is one, comes back with its mode and owner:
    it is moved away, not copied.
    """
    with tempfile.TemporaryDirectory(dir=POLICY.parent, prefix=".lockkit-") as directory:
        kept = Path(directory) / "kept"
        had_policy = POLICY.exists() or POLICY.is_symlink()
        if had_policy:
            POLICY.rename(kept)
        try:
            POLICY.write_text(FORBID)
            POLICY.chmod(0o755)
            yield
        finally:
            POLICY.unlink(missing_ok=True)
            if had_policy:
                kept.rename(POLICY)
