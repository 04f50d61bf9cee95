"""
A root file system with just enough in it for one server: programs of this machine, and what they need to start.

Everything lands where it lies here, so that a program finds its data; a library beside those of its directory, as the
dynamic linker names it (ldd(1)).
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import IO

from lockkit_tools.servers.errors import ServerMissing

# Debian has the old directories as links into /usr, and the dynamic linker looks in both.
MERGED = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")

# What entry scripts may use; all of it is on every Debian.
TOOLS = (
    "awk", "basename", "bash", "cat", "chmod", "chown", "cp", "cut", "date", "dirname", "env", "expr", "find", "grep",
    "head", "hostname", "id", "ls", "mkdir", "mktemp", "mv", "pwd", "readlink", "rm", "sed", "setpriv", "sh", "sleep",
    "sort", "tail", "test", "touch", "tr", "true", "uname", "wc",
)  # fmt: skip

_LIBRARY = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x", re.MULTILINE)
_MISSING = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)


class RootFs:
    """
    Collects files by their place in the image and writes them as a tar archive.

    All of it belongs to root: directories that a server writes to are made by its entry script.
    """

    def __init__(self) -> None:
        self._files: dict[str, Path] = {}
        self._made: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
        self._accounts: list[tuple[str, int]] = [("root", 0)]
        for name in MERGED:
            if Path("/", name).is_symlink():
                self.link(f"/{name}", f"usr/{name}")
        self.directory("/tmp", mode=0o1777)  # noqa: S108 - in the image
        self.program(*TOOLS)

    @property
    def paths(self) -> set[str]:
        """All that is in it, without the leading slash."""
        return {*self._files, *self._made}

    def program(self, *names: str | Path) -> None:
        """Adds programs, with the libraries that they are linked with."""
        for name in names:
            found = shutil.which(name)
            if found is None:
                raise ServerMissing(f"no program {name}, which a stand-in for an image needs")
            self.binary(Path(found))

    def binary(self, path: Path) -> None:
        """Adds a program, with the libraries that it is linked with."""
        self.file(path)
        found, lacking = libraries(path)
        if lacking:
            raise ServerMissing(f"{path} is linked with {', '.join(lacking)}, which is not on this machine")
        for library in found:
            self.file(library)

    def file(self, path: Path) -> None:
        """Adds a file at its own path; of a link what it leads to."""
        self._files[_place(path)] = path.resolve(strict=True)

    def tree(self, path: Path, *, without: tuple[str, ...] = ()) -> None:
        """
        Adds a directory and all below it; links are followed, those that lead nowhere left out.

        A library in it whose own libraries are not on this machine cannot be loaded here either, and need not be there;
        or they are found at run time only, as a Java VM finds its own.
        """
        for entry in sorted(path.iterdir()):
            if any(entry.match(pattern) for pattern in without):
                continue
            if entry.is_dir():
                self.tree(entry, without=without)
            elif entry.is_file():
                self.file(entry)
                if ".so" in entry.suffixes or entry.stat().st_mode & 0o111:
                    for library in libraries(entry)[0]:
                        self.file(library)

    def text(self, path: str, content: str, *, mode: int = 0o644) -> None:
        """Adds a file with this content."""
        info = tarfile.TarInfo(path.lstrip("/"))
        info.mode, info.size = mode, len(content.encode())
        self._made[info.name] = info, content.encode()

    def script(self, path: str, source: Path) -> None:
        """Adds a file of ours as a program."""
        self.text(path, source.read_text(), mode=0o755)

    def directory(self, path: str, *, mode: int = 0o755) -> None:
        """Adds an empty directory."""
        info = tarfile.TarInfo(path.lstrip("/"))
        info.type, info.mode = tarfile.DIRTYPE, mode
        self._made[info.name] = info, b""

    def link(self, path: str, target: str) -> None:
        """Adds a symbolic link."""
        info = tarfile.TarInfo(path.lstrip("/"))
        info.type, info.linkname = tarfile.SYMTYPE, target
        self._made[info.name] = info, b""

    def account(self, name: str, number: int) -> None:
        """Adds a user and a group of that name and number."""
        self._accounts.append((name, number))

    def write(self, output: IO[bytes]) -> None:
        """Writes the archive, its entries in order."""
        self.text("/etc/passwd", "".join(f"{name}:x:{n}:{n}::/:/bin/sh\n" for name, n in self._accounts))
        self.text("/etc/group", "".join(f"{name}:x:{n}:\n" for name, n in self._accounts))
        with tarfile.open(fileobj=output, mode="w|") as archive:
            # What we made first: links such as /lib must be there before what lies behind them.
            for info, content in (self._made[name] for name in sorted(self._made)):
                archive.addfile(info, io.BytesIO(content))
            for name in sorted(self._files):
                _add(archive, name, self._files[name])


def libraries(path: Path) -> tuple[list[Path], list[str]]:
    """The libraries that a program or library is linked with; none of a script."""
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return [], []
    # A program that is linked statically is told so with status 1.
    done = subprocess.run(["ldd", str(path)], check=False, capture_output=True, text=True)
    return [Path(found) for found in _LIBRARY.findall(done.stdout)], _MISSING.findall(done.stdout)


def _place(path: Path) -> str:
    """Where a file lands: its own name, in the directory that its own really is."""
    return str(path.parent.resolve() / path.name).lstrip("/")


def _add(archive: tarfile.TarFile, name: str, path: Path) -> None:
    info = archive.gettarinfo(path, name)
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    # A second name of one file would become a link to a name that the archive may not have.
    info.type, info.size = tarfile.REGTYPE, path.stat().st_size
    with path.open("rb") as file:
        archive.addfile(info, file)
