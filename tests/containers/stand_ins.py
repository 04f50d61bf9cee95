"""
Stand-ins for the pinned images, made of the servers that are installed on this machine.

A stand-in answers to the same tag, reads the same variables and has the same health check as the image, so that the
Compose files can be tried where no registry is to be reached. It is another version of the server (which its label
says), and its entry script is ours: that the image itself works is not shown by it.
"""

from __future__ import annotations

import re
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockkit_tools.servers.binaries import find_program, look_for_jar
from tests.containers.rootfs import RootFs

ENTRY = Path(__file__).with_name("entry")

# Accounts that the servers run as; the numbers are those of the images, so that a volume fits both.
POSTGRES, MYSQL = 999, 999

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Recipe:
    """
    How one server becomes an image.

    Attributes:
        repository: Of the images that it stands in for, whatever their tag.
        kind: Whose programs it needs, by its name in `lockkit_tools.servers.kinds`.
        fill: Puts the server's files into the root file system.
        version: Asks the server which version it is.
        changes: What the image says besides its files, as in a Dockerfile.
    """

    repository: str
    kind: str
    fill: Callable[[RootFs], None]
    version: Callable[[], str]
    changes: tuple[str, ...]

    def root(self) -> RootFs:
        """The whole root file system."""
        root = RootFs()
        self.fill(root)
        return root


def find_recipe(image: str) -> Recipe | None:
    """The recipe for an image, by its name without the tag; None if there is none."""
    repository = image.rpartition(":")[0]
    return next((recipe for recipe in RECIPES if recipe.repository == repository), None)


def _redis(root: RootFs) -> None:
    root.program(find_program("redis-server"), find_program("redis-cli"))
    root.script("/usr/local/bin/docker-entrypoint.sh", ENTRY / "redis.sh")


def _postgres(root: RootFs) -> None:
    programs = find_program("postgres").resolve().parent
    for name in ("postgres", "initdb", "psql", "pg_isready"):
        root.binary(programs / name)
        root.link(f"/usr/local/bin/{name}", str(programs / name))
    # LLVM, which would speed up long queries, is larger than all the rest; without it the server does as well.
    root.tree(_told(programs / "pg_config", "--pkglibdir"), without=("llvmjit*", "bitcode", "pgxs"))
    root.tree(_told(programs / "pg_config", "--sharedir"), without=("extension", "man", "doc"))
    root.tree(_told(programs / "pg_config", "--sharedir") / "extension", without=("[!p]*", "p[!l]*"))
    root.tree(Path("/usr/share/zoneinfo"))
    root.account("postgres", POSTGRES)
    root.script("/usr/local/bin/docker-entrypoint.sh", ENTRY / "postgres.sh")


def _mariadb(root: RootFs) -> None:
    root.program(find_program("mariadbd", "mysqld"), find_program("mariadb", "mysql"))
    # A script, and the two programs that it asks.
    root.program(find_program("mariadb-install-db"), find_program("my_print_defaults"), find_program("resolveip"))
    root.tree(Path("/usr/share/mysql"), without=("mysql-test", "*.sh", "policy"))
    root.account("mysql", MYSQL)
    root.script("/usr/local/bin/docker-entrypoint.sh", ENTRY / "mariadb.sh")
    root.script("/usr/local/bin/healthcheck.sh", ENTRY / "mariadb-healthcheck.sh")


def _zookeeper(root: RootFs) -> None:
    home = find_program("java").resolve().parent.parent
    root.tree(home, without=("jmods", "include", "man", "demo", "src.zip", "*.jsa"))
    root.link("/usr/local/bin/java", str(home / "bin/java"))
    for jar in _jars(_zookeeper_jar()):
        root.file(jar)
    root.script("/usr/local/bin/docker-entrypoint.sh", ENTRY / "zookeeper.sh")
    root.script("/usr/local/bin/zkServer.sh", ENTRY / "zkServer.sh")


def _etcd(root: RootFs) -> None:
    for name in ("etcd", "etcdctl"):
        root.program(find_program(name))
        root.link(f"/usr/local/bin/{name}", str(find_program(name)))


def _zookeeper_jar() -> Path:
    jar = look_for_jar("zookeeper.jar")
    assert jar is not None, "the kind was installed before its recipe is asked"
    return jar


def _jars(jar: Path) -> list[Path]:
    """A jar, those that its manifest names and theirs, and what else lies beside it that the server needs."""
    wanted = [jar, jar.with_name("slf4j-simple.jar"), *sorted(jar.parent.glob("netty-*.jar"))]
    for one in wanted:  # grows while it is walked
        for other in _named_by(one):
            if other not in wanted and other.exists():
                wanted.append(other)
    return wanted


def _named_by(jar: Path) -> list[Path]:
    """The class path in a jar's manifest, whose lines break after 72 bytes and go on after a space."""
    with zipfile.ZipFile(jar) as archive:
        manifest = archive.read("META-INF/MANIFEST.MF").decode().replace("\r", "").replace("\n ", "")
    found = re.search(r"^Class-Path: (.*)$", manifest, re.MULTILINE)
    return [jar.parent / path for path in found[1].split()] if found else []


def _zookeeper_version() -> str:
    with zipfile.ZipFile(_zookeeper_jar()) as archive:
        (properties,) = (name for name in archive.namelist() if re.search(r"zookeeper/zookeeper/pom.properties$", name))
        return _number(archive.read(properties).decode())


def _version_of(*names: str) -> Callable[[], str]:
    return lambda: _number(_output(find_program(*names), "--version"))


def _number(text: str) -> str:
    """The first version in a text."""
    found = re.search(r"\d+\.\d+[\d.]*", text)
    assert found is not None, text
    return found[0]


def _told(program: Path, question: str) -> Path:
    return Path(_output(program, question).strip())


def _output(program: Path, *arguments: str) -> str:
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout


_BY_SCRIPT = 'ENTRYPOINT ["docker-entrypoint.sh"]'

RECIPES = (
    Recipe(
        "redis",
        "redis",
        _redis,
        _version_of("redis-server"),
        (_BY_SCRIPT, 'CMD ["redis-server"]', "WORKDIR /data", "VOLUME /data", "EXPOSE 6379"),
    ),
    Recipe(
        "postgres",
        "postgresql",
        _postgres,
        _version_of("postgres"),
        (_BY_SCRIPT, 'CMD ["postgres"]', "VOLUME /var/lib/postgresql/data", "EXPOSE 5432"),
    ),
    Recipe(
        "mariadb",
        "mariadb",
        _mariadb,
        _version_of("mariadbd", "mysqld"),
        (_BY_SCRIPT, 'CMD ["mariadbd"]', "VOLUME /var/lib/mysql", "EXPOSE 3306"),
    ),
    Recipe(
        "zookeeper",
        "zookeeper",
        _zookeeper,
        _zookeeper_version,
        (_BY_SCRIPT, 'CMD ["zkServer.sh", "start-foreground"]', "VOLUME /data /datalog", "EXPOSE 2181 2888 3888"),
    ),
    Recipe(
        "quay.io/coreos/etcd",
        "etcd",
        _etcd,
        _version_of("etcd"),
        ('CMD ["etcd"]', "EXPOSE 2379 2380"),
    ),
)
