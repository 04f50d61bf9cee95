"""
Decides which backend to use.

The first of these that names one decides:

1. ``url`` given to ``connect``;
2. ``profile`` given to ``connect``;
3. ``LOCKKIT_URL`` in the environment;
4. the profile that ``LOCKKIT_ENV`` names;
5. the profile ``default``, if there is a configuration;
6. without any configuration the embedded file backend, ``file:``.

Profiles are in ``lockkit.toml``, or below ``[tool.lockkit]`` in ``pyproject.toml``::

    [profiles.dev]
    url = "memory://"

    [profiles.prod]
    url = "redlock://:${REDIS_PASSWORD}@lock1,lock2,lock3"
    ttl = 20

lockkit searches from the working directory upwards, and reads only the first file that it finds.
In one directory ``lockkit.toml`` wins; a ``pyproject.toml`` without ``[tool.lockkit]`` does not end the search.
``LOCKKIT_CONFIG`` names one file instead. A file that another user could have written is refused: it chooses the server
that gets the passwords (CVE-2022-24765 was the same in git). Whoever sets ``LOCKKIT_CONFIG`` vouches for the file's
owner and directories; only a file that its group or anybody may write to is refused there.
Every key of a profile except ``url`` is an option, as in ``connect(**options)``; it wins over the query of the url.

``${NAME}`` in a string of a profile is replaced by that environment variable, unchanged: in the user information of a
url its value must be percent-encoded. ``$${`` is a literal ``${``. lockkit does not expand a url that is given to
``connect`` or in ``LOCKKIT_URL``, and refuses one with a ``${`` in it: a program or shell should have replaced it.

A variable that is set but empty is an error: it would be worse to fall back on a lock of this machine alone, where
other machines use a server. For the same reason lockkit warns of a variable such as ``LOCKKIT_ULR``.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockkit import url as urls
from lockkit.errors import ConfigurationError
from lockkit.file_systems import Flaw, find_flaw, find_flaw_on_the_way
from lockkit.validation import nearest, shown

log = logging.getLogger("lockkit")

DEFAULT_URL = "file:"
"""Used where there is no configuration: the file backend in `default_directory`."""

_GIVEN = "the given url"
_DEFAULT = "the default"

_FILES = ("lockkit.toml", "pyproject.toml")
"""Where profiles may be, in the order in which they win within one directory."""

_MEANT = {"PROFILE": "ENV", "ENVIRONMENT": "ENV"}
"""What people may write after ``LOCKKIT_`` and what they mean, besides what nearly is one of `_CHOOSING`."""

_CHOOSING = ("URL", "ENV", "CONFIG")

_OTHER_VARIABLES = frozenset(
    f"LOCKKIT_{name}"
    for name in ("CONFIG", "SCOPE", "STATE_DIR", "DEBUG_ORDER", "NAME", "TOKEN", "OWNER", "DEADLINE", "ONCE")
)
"""Those that lockkit reads, and that ``lockkit run`` sets for its command."""

_REFERENCE = re.compile(r"(?P<literal>\$\$\{)|\$\{(?P<name>[^}]*)(?P<end>\}?)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Settings:
    """
    What `resolve` found.

    Attributes:
        url: The backend's URL.
        options: The profile's options, overridden by those given to ``connect``. May contain passwords.
        source: Where the URL was given, for messages: ``profile 'prod' in /srv/app/lockkit.toml``.
    """

    url: urls.Url
    options: dict[str, Any] = field(repr=False)
    source: str

    @property
    def elsewhere(self) -> str:
        """`source` if the caller has to look there for what is wrong: not if the call or nobody gave the URL."""
        return "" if self.source in {_GIVEN, _DEFAULT} else self.source

    @property
    def embedded(self) -> bool:
        """Whether nothing names a backend, so that locks are files of this user on this machine."""
        return self.source == _DEFAULT


def resolve(
    url: str | None,
    profile: str | None,
    options: Mapping[str, object],
    *,
    environ: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> Settings:
    """Decide which backend to use; the module's docstring has the order. Reads files, but asks no server."""
    environ = os.environ if environ is None else environ
    if url is not None:
        return _from_url(_expanded(url, _GIVEN), options, _GIVEN)
    if profile is not None:
        return _from_profile(profile, "profile=", options, environ, _find_for(profile, "profile=", environ, directory))
    from_environment = _variable(environ, "LOCKKIT_URL")
    if from_environment is not None:
        return _from_url(_expanded(from_environment, "LOCKKIT_URL"), options, "LOCKKIT_URL")
    profile = _variable(environ, "LOCKKIT_ENV")
    if profile is not None:
        found = _find_for(profile, "LOCKKIT_ENV", environ, directory)
        return _from_profile(profile, "LOCKKIT_ENV", options, environ, found)
    configuration = _find(environ, directory)
    _warn_of_misspelled(
        environ, "locks are files of this machine" if configuration is None else f"{configuration[0]} decides"
    )
    if configuration is None:
        log.debug("nothing names a backend, so locks are files of this machine")
        return _from_url(DEFAULT_URL, options, _DEFAULT)
    return _from_profile("default", None, options, environ, configuration)


def _warn_of_misspelled(environ: Mapping[str, str], otherwise: str) -> None:
    """
    Log a warning if a variable was probably meant to choose the backend, and no other variable chooses one.

    No error: the application may have variables of its own, and Kubernetes sets LOCKKIT_PORT for a service named so.
    """
    for name in environ:
        if not name.startswith("LOCKKIT_") or name in _OTHER_VARIABLES:
            continue
        import difflib  # noqa: PLC0415 - `import lockkit` stays light

        word = name.removeprefix("LOCKKIT_")
        for meant in difflib.get_close_matches(_MEANT.get(word, word), _CHOOSING, n=1):
            log.warning(
                "%s is set, which lockkit does not read: did you mean LOCKKIT_%s? Without that, %s",
                name,
                meant,
                otherwise,
            )


def default_directory(environ: Mapping[str, str] | None = None) -> Path:
    """
    Return where the embedded file backend keeps its records by default. The directory need not exist.

    ``LOCKKIT_STATE_DIR``; else ``~/.local/state/lockkit``, on macOS ``~/Library/Application Support/lockkit``. The home
    directory is that of the user database: HOME and XDG_STATE_HOME differ between a shell and cron, whose programs must
    exclude each other.
    """
    environ = os.environ if environ is None else environ
    chosen = _variable(environ, "LOCKKIT_STATE_DIR")
    if chosen is not None:
        # A relative path would mean another directory, and so another set of locks, for each working directory.
        if not Path(chosen).is_absolute():
            message = f"LOCKKIT_STATE_DIR must be an absolute path, not {shown(chosen)}"
            raise ConfigurationError(message)
        return Path(chosen)
    state = Path("Library/Application Support") if sys.platform == "darwin" else Path(".local/state")
    return _home(environ) / state / "lockkit"


def _home(environ: Mapping[str, str]) -> Path:
    # A relative one would be a different directory, and so a different set of locks, for each working directory.
    for home in (_home_of_user(), environ.get("HOME", "")):
        if Path(home).is_absolute():
            return Path(home)
    message = (
        "there is no home directory for the embedded file backend: set LOCKKIT_STATE_DIR, "
        "or give a URL such as file:///var/lock/app"
    )
    raise ConfigurationError(message)


def _home_of_user() -> str:
    """Return what the user database says; empty for a user id without an entry, as containers have it."""
    import pwd  # noqa: PLC0415 - only on Unix

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def _variable(environ: Mapping[str, str], name: str) -> str | None:
    value = environ.get(name)
    if value == "":
        message = f"{name} is set but empty: unset it, or give it a value"
        raise ConfigurationError(message)
    return value


def _expanded(url: str, source: str) -> str:
    """Return a URL that does not come from a profile."""
    if "${" in str(url):
        message = (
            f"{source} has a ${{ in it, which only a profile expands: put the URL into a profile of lockkit.toml, or "
            "expand it first (os.path.expandvars, or double quotes in a shell). Write %24%7B for a literal ${"
        )
        raise ConfigurationError(message)
    return url


def _from_url(url: str, options: Mapping[str, object], source: str) -> Settings:
    try:
        parsed = urls.parse(url)
    except ConfigurationError as error:
        message = f"{source}: {error}"
        raise ConfigurationError(message) from None
    return Settings(parsed, {name: value for name, value in options.items() if value is not None}, source)


def _find_for(
    name: object, origin: str, environ: Mapping[str, str], directory: str | os.PathLike[str] | None
) -> tuple[Path, object]:
    """Check the name of a profile, and find the configuration that should have it."""
    if not isinstance(name, str) or not name:
        message = f"profile must be the name of a profile, not {shown(name)}"
        raise ConfigurationError(message)
    if "://" in name or "@" in name:
        # The message does not show it: it may have a password.
        instead = "url" if origin == "profile=" else "LOCKKIT_URL"
        message = f"{origin} must be the name of a profile, and this looks like a URL: give it as {instead}"
        raise ConfigurationError(message)
    found = _find(environ, directory)
    if found is None:
        message = (
            f"{origin} asks for the profile {shown(name)}, but neither {_start(directory)} nor a directory above it "
            f'has a lockkit.toml (or a pyproject.toml with [tool.lockkit]). Write one with [profiles.{name}] url = "…"'
        )
        raise ConfigurationError(message)
    return found


def _from_profile(
    name: str, origin: str | None, options: Mapping[str, object], environ: Mapping[str, str], found: tuple[Path, object]
) -> Settings:
    """Take the settings from a profile; `origin` is what asks for it, None if nothing chooses a profile."""
    path, table = found
    profiles = _profiles(path, table)
    if name not in profiles:
        known = list(profiles)
        wanted = "nothing chooses a profile, and" if origin is None else f"{origin} asks for the profile {shown(name)},"
        table_name = f"[{_prefix(path)}profiles.{name}]"
        message = f"{wanted} {'but ' if origin else ''}{path} has no profiles: add {table_name} with a url"
        if known and origin is None:
            message = (
                f"{wanted} {path} has no profile 'default'. Its profiles are {', '.join(known)}: choose one with "
                f"LOCKKIT_ENV or profile=, or add {table_name}"
            )
        elif known:
            message = f"{wanted} which {path} does not have{nearest(name, known)}. Its profiles are {', '.join(known)}"
        raise ConfigurationError(message)
    source = f"profile {name!r} in {path}"
    values = {key: _value(key, value, source, environ) for key, value in profiles[name].items()}
    url = values.pop("url", None)
    if not isinstance(url, str):
        message = f'{source}: url is missing or not a string: write url = "redis://…"'
        raise ConfigurationError(message)
    return _from_url(url, {**values, **{key: value for key, value in options.items() if value is not None}}, source)


def _start(directory: str | os.PathLike[str] | None) -> Path:
    """Return where the search begins."""
    try:
        return Path("." if directory is None else directory).absolute()
    except OSError as error:
        message = (
            f"the working directory, where the search for lockkit.toml begins, cannot be found: {error}. Change to one "
            "that exists, or name the backend by a URL or LOCKKIT_URL"
        )
        raise ConfigurationError(message) from error


def _find(environ: Mapping[str, str], directory: str | os.PathLike[str] | None) -> tuple[Path, object] | None:
    """Find the configuration; return its path and its table."""
    chosen = _variable(environ, "LOCKKIT_CONFIG")
    if chosen is not None:
        return _load_chosen(Path(chosen))
    start = _start(directory)
    for above in (start, *start.parents):
        for path in (above / name for name in _FILES):
            table = _load(path)
            if table is not None:
                return path, table
    return None


def _load_chosen(path: Path) -> tuple[Path, object]:
    """Load the file that ``LOCKKIT_CONFIG`` names."""
    table = _load(path, chosen=True)
    if table is None:
        message = f"LOCKKIT_CONFIG names {path}, which {'has no [tool.lockkit]' if path.exists() else 'does not exist'}"
        raise ConfigurationError(message)
    return path, table


def _load(path: Path, *, chosen: bool = False) -> object:
    """
    Return lockkit's table of a TOML file; None if there is no such file, or no such table in a ``pyproject.toml``.

    ConfigurationError: The file is not TOML, cannot be read, or could have been written by another user; with
    `chosen` (``LOCKKIT_CONFIG`` names it), by its group or anybody.
    """
    read = _read(path, chosen=chosen)
    if read is None:
        return None
    data, flaw = read
    table: object = None
    if path.name == "pyproject.toml":
        # A file without this word has no such table, and need not even be TOML.
        tools = _parse(path, data).get("tool") if b"lockkit" in data else None
        table = tools.get("lockkit") if isinstance(tools, dict) else None
        if table is None:
            return None
    if flaw is not None:
        message = f"{path} is refused, since another user could have written it: {flaw.path} {flaw.seen}. {flaw.fix}"
        if not chosen:
            message += f"; or, if you trust whoever can write it, set LOCKKIT_CONFIG={path}"
        raise ConfigurationError(message)
    return _parse(path, data) if table is None else table


def _read(path: Path, *, chosen: bool) -> tuple[bytes, Flaw | None] | None:
    """Read a file, and find out how another user could have written it; None if there is no such file."""
    try:
        # The descriptor is checked: what the name means may change. A FIFO must not block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            message = f"cannot read {path}: it is not a regular file"
            raise ConfigurationError(message)
        with os.fdopen(fd, "rb") as file:
            flaw = find_flaw(str(path), status, owners=frozenset({status.st_uid} if chosen else ()))
            return file.read(), flaw if flaw is not None or chosen else find_flaw_on_the_way(str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        message = f"cannot read {path}: {error}"
        raise ConfigurationError(message) from error


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    import tomllib  # noqa: PLC0415 - `import lockkit` stays light

    text = ""
    try:
        text = data.decode("utf-8-sig")  # editors and shells on Windows write a byte order mark
        return tomllib.loads(text)
    except UnicodeDecodeError as error:
        message = f"cannot read {path}: {error}"
        raise ConfigurationError(message) from error
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits; thousands of brackets
        # The error names line and column, except at the end of the file.
        end = "" if " line " in str(error) else f", line {text.count(chr(10)) + 1}"
        message = f"{path} is not valid TOML: {error}{end}"
        raise ConfigurationError(message) from error


def _prefix(path: Path) -> str:
    """Return what stands in front of ``profiles`` in the names of tables."""
    return "tool.lockkit." if path.name == "pyproject.toml" else ""


def _profiles(path: Path, table: object) -> dict[str, dict[str, object]]:
    """Check the form of a configuration file and return its profiles."""
    prefix = _prefix(path)
    if not isinstance(table, dict):
        message = f"{path}: tool.lockkit must be a table with [{prefix}profiles.NAME] in it"
        raise ConfigurationError(message)
    unknown = [key for key in table if key != "profiles"]
    if unknown:
        message = (
            f"{path}: unknown key {shown(unknown[0])}{nearest(unknown[0], ['profiles'])}. "
            f"Settings belong into a profile, [{prefix}profiles.NAME]: [{prefix}profiles.default] is used if nothing "
            "chooses another"
        )
        raise ConfigurationError(message)
    profiles = table.get("profiles", {})
    if not isinstance(profiles, dict) or not all(isinstance(value, dict) for value in profiles.values()):
        message = f'{path}: a profile must be a table: [{prefix}profiles.NAME] and below it url = "…"'
        raise ConfigurationError(message)
    return profiles


def _value(key: str, value: object, source: str, environ: Mapping[str, str]) -> object:
    if isinstance(value, str):
        return _expand(key, value, source, environ)
    if isinstance(value, (bool, int, float)):
        return value
    message = f"{source}: {key} must be a string, a number, true or false, not {type(value).__name__}"
    raise ConfigurationError(message)


def _expand(key: str, text: str, source: str, environ: Mapping[str, str]) -> str:
    """Replace environment variables. Messages show neither the text nor a value: both may contain a password."""

    def replace(match: re.Match[str]) -> str:
        if match["literal"]:
            return "${"
        name = match["name"]
        if not match["end"] or not _VARIABLE.fullmatch(name):
            message = f"{source}: {key} has a ${{ without the name of a variable and a }}; $${{ is a literal ${{"
            raise ConfigurationError(message)
        value = environ.get(name)
        if value is None:
            message = f"{source}: {key} needs the environment variable {name}, which is not set"
            raise ConfigurationError(message)
        return value

    return _REFERENCE.sub(replace, text)
