from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from lockkit import validation
from lockkit.backend import Host, LockBackend, Option
from lockkit.backends.memory.backend import MemoryBackend
from lockkit.configuration import registry
from lockkit.configuration.registry import Builtin
from lockkit.errors import ConfigurationError
from lockkit.runtime import BlockingRuntime
from lockkit.url import Url, parse

HOST = cast("Host", SimpleNamespace(runtime=BlockingRuntime()))


class Connection:
    """What an application may have: an object of the package ``fakedb``."""

    __module__ = "fakedb.client"


class Fake(MemoryBackend):
    """A backend with options of its own and of its driver."""

    options: ClassVar[Mapping[str, Option]] = {
        "prefix": Option(validation.parse_text, "Put before every key.", "lockkit:"),
        "replicas": Option(validation.parse_int(0, 9), "How many.", 0),
        "sentinel_password": Option(validation.parse_int(0), "Of the sentinels."),
    }
    asked_driver = 0
    opened: ClassVar[list[tuple[object, Mapping[str, Any]]]] = []

    @classmethod
    def driver_options(cls) -> Mapping[str, Option]:
        """Count how often it is asked."""
        cls.asked_driver += 1
        return {
            "socket_timeout": Option(validation.parse_seconds, "Of the driver."),
            "client_name": Option(validation.parse_text, "Of the driver.", "unused"),
        }

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> Fake:
        """Keep what was given."""
        cls.opened.append((url, options))
        return cls("fake", host)

    @classmethod
    def adopt(cls, client: object, options: Mapping[str, Any], host: Host) -> Fake | None:
        """Take a connection, not a list of them."""
        if not isinstance(client, Connection):
            return None
        cls.opened.append((client, options))
        return cls("fake", host)


class FakeQuorum(Fake):
    """A backend over several connections of the same driver."""

    options: ClassVar[Mapping[str, Option]] = {"fencing": Option(validation.parse_bool, "Two rounds.", default=True)}

    @classmethod
    def adopt(cls, client: object, options: Mapping[str, Any], host: Host) -> FakeQuorum | None:
        """Take a list."""
        if not isinstance(client, list):
            return None
        cls.opened.append((client, options))
        return cls("fake", host)


@pytest.fixture(autouse=True)
def _fake_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the fake backends loadable by name; forget what they saw."""
    module = ModuleType("fake_backends")
    vars(module).update(Fake=Fake, FakeQuorum=FakeQuorum, nothing=object())
    monkeypatch.setitem(sys.modules, "fake_backends", module)
    monkeypatch.setattr(Fake, "opened", [])
    monkeypatch.setattr(Fake, "asked_driver", 0)


@pytest.fixture
def builtin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put entries into `BUILTIN` for one test."""

    def add(**entries: Builtin) -> None:
        table = {**registry.BUILTIN, **{name.replace("_", "+"): entry for name, entry in entries.items()}}
        monkeypatch.setattr(registry, "BUILTIN", MappingProxyType(table))

    return add


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a distribution with entry points, as far as `importlib.metadata` can tell."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(distribution: str, **entries: str) -> None:
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name.replace('_', '+')} = {target}" for name, target in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[lockkit.backends]", *lines, ""]))

    return write


# -- find ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", sorted(registry.BUILTIN))
def test_every_builtin_loads(scheme: str) -> None:
    """Its target exists and is a backend."""
    assert issubclass(registry.find(scheme), LockBackend)


def test_builtin_is_found_without_reading_metadata() -> None:
    """In a fresh interpreter: that module alone takes longer to import than lockkit."""
    code = (
        "import sys, lockkit.configuration.registry as r; r.find('memory');"
        "print(sorted({'importlib.metadata', 'difflib', 'asyncio', 'tomllib'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert result.stdout == "[]\n"


def test_third_party_backend_is_found(install: Callable[..., None]) -> None:
    """By its entry point, with a driver in the scheme too. It replaces no built-in one: locks stay where they were."""
    install("stranger", zoo="fake_backends:Fake", zoo_special="fake_backends:FakeQuorum", memory="fake_backends:Fake")
    # A checkout and its installation may both be present.
    install("stranger_editable", zoo="fake_backends:Fake")

    assert registry.find("zoo") is Fake
    assert registry.find("zoo+special") is FakeQuorum
    assert registry.find("zoo+driver") is Fake
    assert registry.find("memory") is MemoryBackend
    known = registry.schemes()
    assert known == sorted({*known, *registry.BUILTIN, "zoo"})


def test_builtin_takes_a_driver_only_where_it_says_so(builtin: Callable[..., None]) -> None:
    """``memory+x`` is no scheme."""
    builtin(
        db=Builtin("fake_backends:Fake", drivers=True),
        red=Builtin("fake_backends:Fake"),
        red_sentinel=Builtin("fake_backends:FakeQuorum"),
    )

    assert registry.find("db+driver") is Fake
    assert registry.find("red+sentinel") is FakeQuorum
    for scheme in ("red+driver", "memory+driver", "db+"):
        with pytest.raises(ConfigurationError, match="unknown URL scheme"):
            registry.find(scheme)


def test_scheme_registered_twice_is_refused(install: Callable[..., None]) -> None:
    """Which one would win depends on the order of directories: both packages are named."""
    install("stranger", zoo="fake_backends:Fake")
    install("other", zoo="fake_backends:FakeQuorum")

    with pytest.raises(ConfigurationError, match="registered twice") as caught:
        registry.find("zoo")
    assert "package stranger" in str(caught.value)
    assert "package other" in str(caught.value)


def test_unknown_scheme_suggests_the_nearest_and_lists_all() -> None:
    """A slip of the finger is mended without the manual."""
    with pytest.raises(
        ConfigurationError, match=r"'memroy' \(did you mean 'memory'\?\)\. Known schemes are .*file.*memory"
    ):
        registry.find("memroy")


def test_missing_driver_names_the_extra(builtin: Callable[..., None]) -> None:
    """And keeps the import error as the cause."""
    builtin(red=Builtin("no_such_module:Backend", extra="redis"))

    with pytest.raises(ConfigurationError, match=r"pip install 'lockkit\[redis\]'") as caught:
        registry.find("red")
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:Backend", r"zoo: URLs cannot be loaded .*package stranger"),
        ("fake_backends:Missing", r"zoo: URLs cannot be loaded .*package stranger"),
        ("fake_backends:nothing", "is not a subclass of lockkit"),
        ("builtins:dict", "is not a subclass of lockkit"),
    ],
)
def test_broken_third_party_is_refused(install: Callable[..., None], target: str, message: str) -> None:
    """Before anything of it is called; the one to blame is not lockkit."""
    install("stranger", zoo=target)

    with pytest.raises(ConfigurationError, match=message):
        registry.find("zoo")


def test_missing_module_of_lockkit_is_told_from_a_missing_driver(builtin: Callable[..., None]) -> None:
    """In a bundle neither `pip install` of an extra nor a new installation helps."""
    builtin(zoo=Builtin("lockkit.backends.no_such.backend:Backend", extra="redis"))

    with pytest.raises(ConfigurationError, match=r"lockkit itself is missing\. If this program is a bundle") as caught:
        registry.find("zoo")

    assert "The module lockkit.backends.no_such of" in str(caught.value)
    assert "pip install" not in str(caught.value)


# -- options -------------------------------------------------------------------------------------------------------


def test_given_options_win_over_the_query() -> None:
    """Parsed, with defaults, the engine's apart from the backend's; None counts as not given."""
    given = {"ttl": 7, "replicas": "3", "prefix": None}

    engine, backend = registry.split_options(Fake, parse("fake://h?ttl=5&replicas=2&prefix=p"), given)

    assert engine == {"ttl": 7.0, "timeout": None, "unavailable_after": None, "scope": None}
    assert backend == {"prefix": "p", "replicas": 3, "sentinel_password": None}


def test_driver_is_asked_only_when_needed() -> None:
    """Its answer may mean an import; its defaults are its own business."""
    registry.split_options(Fake, parse("fake://h?ttl=5&replicas=2"), {"prefix": "x"})
    assert Fake.asked_driver == 0

    _, backend = registry.split_options(Fake, parse("fake://h?socket_timeout=1.5"), {"prefix": "x"})
    assert Fake.asked_driver == 1
    assert backend["socket_timeout"] == 1.5
    assert "client_name" not in backend

    registry.split_options(Fake, parse("fake://h?socket_timeout=1.5"), {"client_name": "x"})
    assert Fake.asked_driver == 2


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("tll", "ttl"),
        ("unavailable", "unavailable_after"),
        ("prefx", "prefix"),
        ("socket_timout", "socket_timeout"),
        ("profil", "profile"),
    ],
)
def test_unknown_option_suggests_the_nearest(name: str, suggestion: str) -> None:
    """In the URL and in the call, for an option of lockkit and of the driver."""
    for query, given in ((f"?{name}=1", {}), ("", {name: 1})):
        with pytest.raises(ConfigurationError, match=rf"unknown option '{name}' .*\(did you mean '{suggestion}'\?\)"):
            registry.split_options(Fake, parse(f"fake://u:hunter2@h{query}"), given)


def test_unknown_option_lists_what_there_is() -> None:
    """Where nothing is near; the URL is shown without its password."""
    with pytest.raises(ConfigurationError) as caught:
        registry.split_options(Fake, parse("fake://u:hunter2@h?zzz=1"), {})

    assert str(caught.value) == (
        "unknown option 'zzz' for fake://u:***@h?zzz=1. "
        "Its options are ttl, timeout, unavailable_after, scope, prefix, replicas, sentinel_password"
    )
    assert caught.value.backend == "fake://u:***@h?zzz=1"


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("ttl", "0", "more than 0"),
        ("ttl", "abc", "more than 0"),
        ("timeout", "-1", "0 or more"),
        ("unavailable_after", "-1", "0 or more"),
        ("replicas", "10", "from 0 to 9"),
        ("socket_timeout", "x", "0 or more"),
    ],
)
def test_wrong_value_names_option_and_value(name: str, value: str, part: str) -> None:
    """And what is accepted."""
    with pytest.raises(ConfigurationError, match=f"option {name}='{value}' .*{part}") as caught:
        registry.split_options(Fake, parse(f"fake://h?{name}={value}"), {})
    assert caught.value.backend == f"fake://h?{name}={value}"


@pytest.mark.parametrize("given", [{}, {"sentinel_password": "hunter2"}])
def test_wrong_value_of_a_secret_option_is_hidden(given: dict[str, object]) -> None:
    """Also in the cause, which would be printed with it."""
    url = parse("fake://h" if given else "fake://h?sentinel_password=hunter2")

    with pytest.raises(ConfigurationError, match=r"sentinel_password=\*\*\*") as caught:
        registry.split_options(Fake, url, given)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


# -- open and adopt ------------------------------------------------------------------------------------------------


def test_open_backend_gives_the_backend_its_options(builtin: Callable[..., None]) -> None:
    """And the engine its own."""
    builtin(fake=Builtin("fake_backends:Fake"))
    url = parse("fake://h?ttl=5")

    backend, engine = registry.open_backend(url, {"replicas": "1"}, HOST)

    assert type(backend) is Fake
    assert engine == {"ttl": 5.0, "timeout": None, "unavailable_after": None, "scope": None}
    assert Fake.opened == [(url, {"prefix": "lockkit:", "replicas": 1, "sentinel_password": None})]


@pytest.fixture
def _adopters(builtin: Callable[..., None]) -> None:
    """Two backends of one driver, one of a driver that is not installed."""
    builtin(
        missing=Builtin("no_such_module:Backend", extra="redis", adopts=("otherdb",)),
        quorum=Builtin("fake_backends:FakeQuorum", adopts=("fakedb",)),
        fake=Builtin("fake_backends:Fake", adopts=("fakedb",)),
        fakes=Builtin("fake_backends:Fake", adopts=("fakedb",)),
    )


class Own(Connection):
    """A subclass of the application."""

    __module__ = "app.db"


@pytest.mark.usefixtures("_adopters")
@pytest.mark.parametrize(
    ("client", "options", "wanted"),
    [
        # The missing driver is not even looked for.
        (Connection(), {"ttl": 5}, Fake),
        (Own(), {}, Fake),
        ([Own(), Own()], {"fencing": "off"}, FakeQuorum),
        # The one that is asked first does not know the option, nor the object.
        (Connection(), {"prefix": "x"}, Fake),
    ],
)
def test_adopt_asks_the_backends_of_the_objects_package(
    client: object, options: dict[str, object], wanted: type[Fake]
) -> None:
    """A subclass counts by its base, several connections by their type."""
    backend, engine = registry.adopt(client, options, HOST)

    assert type(backend) is wanted
    assert engine["ttl"] == options.get("ttl")
    assert [given for given, _ in Fake.opened] == [client]


@pytest.mark.usefixtures("_adopters")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        # The application has made the connection without them, so they would have no effect.
        ("socket_timeout", "'socket_timeout' is for the driver"),
        # And not that no backend accepts the object.
        ("prefx", "unknown option 'prefx' for Fake"),
    ],
)
def test_adopt_refuses_options_that_have_no_effect(option: str, message: str) -> None:
    """Of the driver, and of nobody."""
    with pytest.raises(ConfigurationError, match=message):
        registry.adopt(Connection(), {option: 5}, HOST)


@pytest.mark.usefixtures("_adopters")
@pytest.mark.parametrize(
    ("client", "kind"),
    [(object(), "builtins.object"), ("redis://h", "builtins.str"), ([], "builtins.list"), (None, "NoneType")],
)
def test_adopt_lists_what_is_accepted(client: object, kind: str) -> None:
    """And shows the type, never the object: its repr may hold a password."""
    with pytest.raises(
        ConfigurationError, match=rf"{kind}\. Built-in backends accept objects of: (\w+, )*fakedb, (\w+, )*otherdb[,;]"
    ):
        registry.adopt(client, {}, HOST)


def test_adopt_asks_third_party_backends_too(install: Callable[..., None]) -> None:
    """After the built-in ones."""
    install("stranger", zoo="fake_backends:Fake")

    assert type(registry.adopt(Connection(), {}, HOST)[0]) is Fake


def test_adopt_passes_over_third_party_backends_without_their_driver(install: Callable[..., None]) -> None:
    """No object can come from a driver that is not installed; and no package can replace a built-in backend."""
    install("broken", broken="no_such_module:Backend", memory="fake_backends:Fake")

    with pytest.raises(ConfigurationError, match=r"no backend accepts a connection of type fakedb\.client\.Connection"):
        registry.adopt(Connection(), {}, HOST)
