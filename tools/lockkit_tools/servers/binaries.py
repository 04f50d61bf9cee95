"""Where server programs are: on PATH, and where packages put them that PATH does not list."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from lockkit_tools.servers.errors import ServerMissing

# Debian keeps servers in sbin and one PostgreSQL per version; Homebrew keeps versions
# that are not linked into its bin in opt.
PLACES = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/usr/sbin",
    "/usr/local/sbin",
    "/usr/libexec",
    "/opt/homebrew/bin",
    "/opt/homebrew/opt/*/bin",
    "/usr/local/opt/*/bin",
    "/usr/local/pgsql/bin",
)


# ZooKeeper's own archive, Debian's package, Homebrew.
JAR_PLACES = (
    "/usr/share/java",
    "/opt/zookeeper/lib",
    "/opt/*zookeeper*/lib",
    "/usr/share/zookeeper/lib",
    "/opt/homebrew/opt/zookeeper/libexec/lib",
    "/usr/local/opt/zookeeper/libexec/lib",
)


def look_for(*names: str) -> Path | None:
    """
    The first of some programs that is on this machine; None if there is none.

    Of several versions in the usual places the newest.
    """
    for name in names:
        if (on_path := shutil.which(name)) is not None:
            return Path(on_path)
        for place in PLACES:
            found = sorted(Path("/").glob(f"{place[1:]}/{name}"), key=_version)
            if found:
                return found[-1]
    return None


def find_program(*names: str) -> Path:
    """The first of some programs that is on this machine."""
    if (found := look_for(*names)) is None:
        raise ServerMissing(
            f"no program {' or '.join(names)} on PATH or in the usual places; "
            f"try: python -m lockkit_tools.servers install"
        )
    return found


def look_for_jar(name: str) -> Path | None:
    """A Java library, with or without a version in its file name; None if it is not here."""
    stem = name.removesuffix(".jar")
    home = os.environ.get("ZOOKEEPER_HOME")
    for place in (*((f"{home}/lib",) if home else ()), *JAR_PLACES):
        for pattern in (name, f"{stem}-[0-9]*.jar"):
            found = sorted(Path("/").glob(f"{place[1:]}/{pattern}"), key=_version)
            if found:
                return found[-1]
    return None


def _version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]
