"""
Finds the backend for the scheme of a URL, or for the type of a connection.

Built-in backends are listed in `BUILTIN`, so that a checkout works without installation; other packages register theirs
in the entry-point group ``lockkit.backends``. The same function loads both, when they are first used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lockkit.backend import Host, LockBackend, LossReason, Option
from lockkit.errors import ConfigurationError
from lockkit.runtime import BlockingRuntime
from lockkit.url import HIDDEN, Url, is_secret
from lockkit.validation import about, nearest, parse_choice, parse_seconds, parse_ttl, shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


log = logging.getLogger("lockkit")

GROUP = "lockkit.backends"
"""The entry-point group: scheme = module:class."""

_SCOPES = ("process", "machine", "network")
"""Values of `Capabilities.scope`, the narrowest first."""

WITHIN = {"process": "threads and tasks of this process", "machine": "processes of this machine"}
"""Which others the locks of each narrow scope exclude."""

ENGINE_OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "ttl": Option(
            parse_ttl, "Seconds after which the backend frees a lock that is not renewed, unless lock() gives a ttl."
        ),
        "timeout": Option(
            parse_seconds,
            "Seconds that a caller waits for a lock, unless lock() gives a timeout. Not given: without limit.",
        ),
        "unavailable_after": Option(
            parse_seconds, "Seconds without any answer after which a wait without timeout raises BackendUnavailable."
        ),
        "scope": Option(
            parse_choice(*_SCOPES),
            "Refuse a backend that locks out fewer: process, machine, network. Not given: LOCKKIT_SCOPE, or any.",
        ),
    }
)
"""Options of every backend. The engine reads them and has their defaults; None here means not given."""


@dataclass(frozen=True, slots=True)
class Builtin:
    """A backend that is part of lockkit."""

    target: str  # module:class
    extra: str | None = None  # of pip install 'lockkit[…]', which installs its driver
    adopts: tuple[str, ...] = ()  # top-level modules whose objects ``from_client`` offers to it
    drivers: bool = False  # it also takes URLs with ``scheme+driver``
    modes: Mapping[str, str] = field(default_factory=dict)  # the classes that its option ``mode`` selects instead


_SQL_MODES = {
    "table": "lockkit.backends.sql_table.table",
    "row": "lockkit.backends.sql_session.row",
    "advisory": "lockkit.backends.sql_session.advisory",
}


def _sql(kind: str, extra: str | None, *modes: str) -> Builtin:
    targets = {mode: f"{_SQL_MODES[mode]}:{kind}{mode.capitalize()}" for mode in modes}
    return Builtin(targets["table"], extra, ("sqlalchemy",), drivers=True, modes=MappingProxyType(targets))


_REDIS = ("redis", "rediss", "unix", "valkey", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_ETCD = Builtin("lockkit.backends.etcd.backend:EtcdBackend", "etcd", ("grpc", "etcd3", "pyetcd", "aetcd", "etcd3gw"))

BUILTIN: Mapping[str, Builtin] = MappingProxyType(
    {
        "memory": Builtin("lockkit.backends.memory.backend:MemoryBackend"),
        "file": Builtin("lockkit.backends.file.backend:FileBackend"),
        **dict.fromkeys(_REDIS, Builtin("lockkit.backends.redis.backend:RedisBackend", "redis", ("redis",))),
        **dict.fromkeys(
            ("redlock", "redlocks"), Builtin("lockkit.backends.redlock.backend:RedlockBackend", "redis", ("redis",))
        ),
        **dict.fromkeys(
            ("zookeeper", "zk"),
            Builtin("lockkit.backends.zookeeper.backend:ZooKeeperBackend", "zookeeper", ("kazoo",)),
        ),
        **dict.fromkeys(("etcd", "etcd3", "etcds"), _ETCD),
        **dict.fromkeys(("postgresql", "postgres"), _sql("Postgresql", "postgresql", "table", "row", "advisory")),
        **dict.fromkeys(("mysql", "mariadb"), _sql("Mysql", "mysql", "table", "row", "advisory")),
        "sqlite": _sql("Sqlite", None, "table"),
        **dict.fromkeys(("s3", "gs", "az"), Builtin("lockkit.backends.object_store.backend:ObjectBackend", "objects")),
    }
)
"""Scheme to backend."""


def schemes() -> list[str]:
    """Return every known URL scheme, also those whose driver is missing, in alphabetical order."""
    return sorted({*BUILTIN, *(entry.name for entry in _entry_points())})


def modes(scheme: str) -> list[str | None]:
    """Return the modes of a scheme, the default first; only None if it has no modes."""
    builtin = BUILTIN.get(scheme)
    return [*builtin.modes] if builtin is not None and builtin.modes else [None]


def find(scheme: str, mode: object = None) -> type[LockBackend]:
    """Load the backend of a URL scheme."""
    base, _, driver = scheme.partition("+")
    for name in (scheme, base) if driver else (scheme,):
        # Built-in first: reading the metadata of all installed packages takes longer than the rest of connect().
        builtin = BUILTIN.get(name)
        if builtin is not None and (name == scheme or builtin.drivers):
            return _load_builtin(name, builtin, mode)
        entry = _entry_point(name) if builtin is None else None
        if entry is not None:
            return _load_entry(entry)
    known = schemes()
    message = f"unknown URL scheme {shown(scheme)}{nearest(scheme, known)}. Known schemes are {', '.join(known)}"
    raise ConfigurationError(message)


def open_backend(
    url: Url, given: Mapping[str, object], host: Host, *, source: str = ""
) -> tuple[LockBackend, dict[str, Any]]:
    """Make the backend of a URL. No I/O."""
    with from_source(source):
        backend_class = find_for(url, given)
        engine_options, options = split_options(backend_class, url, given)
        return backend_class.open(url, options, host), engine_options


def find_for(url: Url, given: Mapping[str, object]) -> type[LockBackend]:
    """Load the backend of a URL, in the mode that its query or the options given separately choose; see `find`."""
    mode = given.get("mode")
    return find(url.scheme, dict(url.query).get("mode") if mode is None else mode)


@contextmanager
def from_source(source: str) -> Iterator[None]:
    """Have a `ConfigurationError` say where URL and options come from: they are not in front of the caller."""
    try:
        yield
    except ConfigurationError as error:
        if source:
            error.args = (f"{error} [{source}]",)
        raise


def adopt(client: object, given: Mapping[str, object], host: Host) -> tuple[LockBackend, dict[str, Any]]:
    """Make a backend on the application's own connection."""
    wrong_option: ConfigurationError | None = None
    for backend_class in _adopters(client, given.get("mode")):
        try:
            engine_options, options = split_options(backend_class, None, given)
        except ConfigurationError as error:
            # The next backend that adopts such objects may have the option.
            wrong_option = wrong_option or error
            continue
        backend = backend_class.adopt(client, options, host)
        if backend is not None:
            if of_driver := options.keys() - backend_class.options.keys():
                name, kind = min(of_driver), type(client).__name__
                message = f"the option {name!r} is for the driver, which made the {kind} already: give it to the {kind}"
                raise ConfigurationError(message)
            return backend, engine_options
    if wrong_option is not None:
        raise wrong_option
    accepted = sorted({root for builtin in BUILTIN.values() for root in builtin.adopts})
    instead = "Give one of those, or pass a URL to lockkit.connect"
    if type(client).__module__.startswith("django."):
        instead = "Call lockkit.integrations.django.from_connection(connection)"
    elif type(client).__module__.startswith("sqlalchemy."):
        instead = "Give the engine: session.get_bind(), connection.engine"
    raise ConfigurationError(
        f"no backend accepts a connection of type {type(client).__module__}.{type(client).__qualname__}. "
        f"Built-in backends accept objects of: {', '.join(accepted)}; installed ones may accept others. {instead}"
    )


def split_options(
    backend_class: type[LockBackend], url: Url | None, given: Mapping[str, object]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the options of a URL and of a call into the engine's and the backend's, parsed, with their defaults."""
    values: dict[str, object] = dict(url.query) if url is not None else {}
    values.update((name, value) for name, value in given.items() if value is not None)
    safe_url = url.redacted() if url is not None else None
    where = safe_url or backend_class.__name__
    known: Mapping[str, Option] = {**backend_class.options, **ENGINE_OPTIONS}
    parsed = {name: option.default for name, option in known.items()}
    with about(None, safe_url):
        if not values.keys() <= known.keys():
            known = {**_driver_options(backend_class, url), **known}
        for name, value in values.items():
            if name not in known:
                # A driver may have dozens of options, so the message may suggest one but does not list them.
                mode = backend_class.options.get("mode")
                raise ConfigurationError(
                    f"unknown option {shown(name)} for {where}{f' in mode={mode.default}' if mode is not None else ''}"
                    f"{nearest(name, [*known, 'profile'])}. "
                    f"Its options are {', '.join([*ENGINE_OPTIONS, *backend_class.options])}"
                )
            parsed[name] = _parse(known[name], name, value, where)
        engine_options = {name: parsed.pop(name) for name in ENGINE_OPTIONS}
        _check_scope(engine_options["scope"], backend_class.capabilities.scope, where)
    return engine_options, parsed


def _check_scope(wanted: str | None, scope: str, where: str) -> None:
    """Refuse a backend that locks out fewer processes than the options want; without them, than ``LOCKKIT_SCOPE``."""
    source = "scope"
    if wanted is None and "LOCKKIT_SCOPE" in os.environ:
        source = "LOCKKIT_SCOPE"
        with from_source(source):
            wanted = _parse(ENGINE_OPTIONS["scope"], "scope", os.environ[source], where)
    if wanted is None or _SCOPES.index(scope) >= _SCOPES.index(wanted):
        return
    instead = "redis://… or postgresql://…" if wanted == "network" else "file:"
    raise ConfigurationError(
        f"{where} locks out only other {WITHIN[scope]}, and {source}={wanted} asks for more. Name a backend that "
        f"does, such as {instead}; or give scope={scope} if that is enough"
    )


def warn_if_narrow(client: Any, what: str) -> None:  # noqa: ANN401 - of either API: importing this loads neither
    """Warn if the locks of a client do not exclude other machines; `what` says who locks."""
    if (whom := WITHIN.get(client.capabilities.scope)) is not None:
        log.warning(
            "%s at %s, which locks out %s only: if workers run elsewhere too, set the URL of a lock server",
            what, client.url, whom,
        )  # fmt: skip


def _driver_options(backend_class: type[LockBackend], url: Url | None) -> Mapping[str, Option]:
    try:
        return backend_class.driver_options()
    except ConfigurationError:
        if url is not None:
            raise
        return {}  # the driver is missing: then the object is not one of its own


def _parse(option: Option, name: str, value: object, where: str) -> Any:  # noqa: ANN401 - whatever the option gives
    try:
        return option.parse(value)
    except (ValueError, TypeError) as error:
        # A value with an @ in it may be a URL with a password. (Python writes no int of more than 4300 digits.)
        if is_secret(name) or (not isinstance(value, int) and "@" in str(value)):
            message = f"option {name}={HIDDEN} for {where} has an invalid value: {option.help}"
            # Not raised from the error: parsers may quote the value.
            raise ConfigurationError(message) from None
        raise ConfigurationError(f"option {name}={shown(value)} for {where}: {error}") from error


def _adopters(client: object, mode: object) -> Iterator[type[LockBackend]]:
    """
    Load, one after the other, the backends that may know the type of an object; its driver is imported already.

    A subclass counts by its bases, a list by its elements.
    """
    samples = client if isinstance(client, (list, tuple)) else [client]
    roots = {cls.__module__.partition(".")[0] for sample in samples for cls in type(sample).__mro__}
    seen = set()
    for scheme, builtin in BUILTIN.items():
        if builtin.target not in seen and not roots.isdisjoint(builtin.adopts):
            seen.add(builtin.target)
            yield _load_builtin(scheme, builtin, mode)
    for entry in _entry_points():
        # What they adopt is known only after loading them.
        if entry.name not in BUILTIN and entry.value not in seen:
            seen.add(entry.value)
            try:
                import_module(entry.module)
            except ImportError:
                continue  # a missing driver: there can be no object of it
            yield _load_entry(entry)


def _entry_points() -> list[EntryPoint]:
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow, and not needed for built-in backends

    return list(entry_points(group=GROUP))


def _entry_point(scheme: str) -> EntryPoint | None:
    found = {entry.value: entry for entry in _entry_points() if entry.name == scheme}
    if len(found) > 1:
        owners = " and ".join(f"{entry.value} of {_owner(entry)}" for entry in found.values())
        raise ConfigurationError(f"the URL scheme {shown(scheme)} is registered twice: by {owners}. Uninstall one")
    return next(iter(found.values()), None)


def _owner(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist is not None else "an unknown package"


def _load_entry(entry: EntryPoint) -> type[LockBackend]:
    return load(entry.name, entry.value, f"It belongs to {_owner(entry)}: install that with what it needs")


def _load_builtin(scheme: str, builtin: Builtin, mode: object) -> type[LockBackend]:
    hint = "It is part of lockkit: reinstall lockkit"
    if builtin.extra is not None:
        hint = f"Install what it needs: pip install 'lockkit[{builtin.extra}]'"
    target = builtin.target
    if builtin.modes and mode is not None:
        if not isinstance(mode, str) or mode not in builtin.modes:
            known = list(builtin.modes)
            raise ConfigurationError(
                f"{scheme}: URLs have no mode={shown(mode)}{nearest(mode, known)}. "
                f"Give mode={' or mode='.join(known)}, or leave it out for {known[0]}"
            )
        target = builtin.modes[mode]
    return load(scheme, target, hint)


def load(scheme: str, target: str, hint: str) -> type[LockBackend]:
    """Import a backend class."""
    module_name, _, attribute = target.partition(":")
    try:
        backend_class = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: the module's name is empty
        missing = getattr(error, "name", None) or ""
        if isinstance(error, ModuleNotFoundError) and missing.partition(".")[0] == "lockkit":
            hint = (
                f"The module {missing} of lockkit itself is missing. If this program is a bundle, add it there (with "
                "PyInstaller: --collect-submodules lockkit.backends); elsewhere reinstall lockkit"
            )
        raise ConfigurationError(f"the backend for {scheme}: URLs cannot be loaded ({error}). {hint}") from error
    if not isinstance(backend_class, type) or not issubclass(backend_class, LockBackend):
        message = f"{target}, registered for {scheme}: URLs, is not a subclass of lockkit.backend.LockBackend. {hint}"
        raise ConfigurationError(message)
    return backend_class


class DetachedHost:
    """A `lockkit.backend.Host` for blocking calls to a backend that holds no lock."""

    def __init__(self) -> None:
        self.runtime = BlockingRuntime()

    def lost(self, owner: str, reason: LossReason) -> None:
        """Nothing is held."""

    def confirm_soon(self) -> None:
        """Nothing is held."""
