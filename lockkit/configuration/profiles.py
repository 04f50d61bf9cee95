"""
Decides which backend to use.

The first of these that names one decides:

1. ``url`` given to ``connect``;
2. ``profile`` given to ``connect``;
3. ``LOCKKIT_URL`` in the environment;
4. the profile that ``LOCKKIT_ENV`` names;
5. the embedded file backend, ``file:``.

Profiles are in ``lockkit.toml``, or below ``[tool.lockkit]`` in ``pyproject.toml``::

    [profiles.dev]
    url = "memory://"

    [profiles.prod]
    url = "redlock://:${REDIS_PASSWORD}@lock1,lock2,lock3"
    ttl = 20

lockkit searches from the working directory upwards, and reads only the first file that it finds.
In one directory ``lockkit.toml`` wins; a ``pyproject.toml`` without ``[tool.lockkit]`` does not end the search.
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
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockkit import url as urls
from lockkit.errors import ConfigurationError
from lockkit.validation import nearest, shown

__all__ = ["DEFAULT_URL", "Settings", "default_directory", "resolve"]

log = logging.getLogger("lockkit")

DEFAULT_URL = "file:"
"""Used where nothing is configured: the file backend in `default_directory`."""

_GIVEN = "the given url"
_DEFAULT = "the default"

_MEANT = {"PROFILE": "ENV", "ENVIRONMENT": "ENV"}
"""What people may write after ``LOCKKIT_`` and what they mean, besides what nearly is ``URL`` or ``ENV``."""

_OTHER_VARIABLES = frozenset(
    f"LOCKKIT_{name}" for name in ("STATE_DIR", "DEBUG_ORDER", "NAME", "TOKEN", "OWNER", "DEADLINE", "ONCE")
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


def resolve(
    url: str | None,
    profile: str | None,
    options: Mapping[str, object],
    *,
    environ: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> Settings:
    """
    Decide which backend to use; the module's docstring has the order. Reads files, but asks no server.

    Args:
        url: As given to ``connect``, or None.
        profile: As given to ``connect``, or None.
        options: As given to ``connect``. One that is None counts as not given.
        environ: The environment; the process's by default.
        directory: Where the search for files begins; the working directory by default.

    Raises:
        ConfigurationError: The deciding value is malformed, or a profile, file or variable is missing.
    """
    environ = os.environ if environ is None else environ
    if url is not None:
        return _from_url(_expanded(url, _GIVEN), options, _GIVEN)
    if profile is not None:
        return _from_profile(profile, "profile=", options, environ, directory)
    from_environment = _variable(environ, "LOCKKIT_URL")
    if from_environment is not None:
        return _from_url(_expanded(from_environment, "LOCKKIT_URL"), options, "LOCKKIT_URL")
    profile = _variable(environ, "LOCKKIT_ENV")
    if profile is not None:
        return _from_profile(profile, "LOCKKIT_ENV", options, environ, directory)
    _warn_of_misspelled(environ)
    return _from_url(DEFAULT_URL, options, _DEFAULT)


def _warn_of_misspelled(environ: Mapping[str, str]) -> None:
    """
    Log a warning if a variable was probably meant to choose the backend, and nothing else chooses one.

    No error: the application may have variables of its own, and Kubernetes sets LOCKKIT_PORT for a service named so.
    """
    for name in environ:
        if not name.startswith("LOCKKIT_") or name in _OTHER_VARIABLES:
            continue
        import difflib  # noqa: PLC0415 - `import lockkit` stays light

        word = name.removeprefix("LOCKKIT_")
        for meant in difflib.get_close_matches(_MEANT.get(word, word), ("URL", "ENV"), n=1):
            log.warning(
                "%s is set, which lockkit does not read: did you mean LOCKKIT_%s? Without that, locks are files of "
                "this machine",
                name,
                meant,
            )


def default_directory(environ: Mapping[str, str] | None = None) -> Path:
    """
    Return where the embedded file backend keeps its records by default. The directory need not exist.

    ``LOCKKIT_STATE_DIR``; else ``~/.local/state/lockkit``, on macOS ``~/Library/Application Support/lockkit``. The home
    directory is that of the user database: HOME and XDG_STATE_HOME differ between a shell and cron, whose programs must
    exclude each other.

    Args:
        environ: The environment; the process's by default.

    Raises:
        ConfigurationError: ``LOCKKIT_STATE_DIR`` is not absolute, or the user has no home directory.
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
    """
    Return a URL that does not come from a profile.

    Raises:
        ConfigurationError: It has a ``${``, which would fail later, as an unknown host or a wrong password.
    """
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


def _from_profile(
    name: object,
    origin: str,
    options: Mapping[str, object],
    environ: Mapping[str, str],
    directory: str | os.PathLike[str] | None,
) -> Settings:
    if not isinstance(name, str) or not name:
        message = f"profile must be the name of a profile, not {shown(name)}"
        raise ConfigurationError(message)
    if "://" in name or "@" in name:
        # The message does not show it: it may have a password.
        instead = "url" if origin == "profile=" else "LOCKKIT_URL"
        message = f"{origin} must be the name of a profile, and this looks like a URL: give it as {instead}"
        raise ConfigurationError(message)
    try:
        start = Path("." if directory is None else directory).absolute()
    except OSError as error:
        message = f"{origin} asks for the profile {shown(name)}, but the working directory cannot be found: {error}"
        raise ConfigurationError(message) from error
    found = _search(start)
    if found is None:
        message = (
            f"{origin} asks for the profile {shown(name)}, but neither {start} nor a directory above it has a "
            f'lockkit.toml (or a pyproject.toml with [tool.lockkit]). Write one with [profiles.{name}] url = "…"'
        )
        raise ConfigurationError(message)
    path, table = found
    profiles = _profiles(path, table)
    if name not in profiles:
        known = list(profiles)
        message = (
            f"{origin} asks for the profile {shown(name)}, which {path} does not have{nearest(name, known)}. "
            f"Its profiles are {', '.join(known)}"
            if known
            else f"{origin} asks for the profile {shown(name)}, but {path} has no profiles"
        )
        raise ConfigurationError(message)
    source = f"profile {name!r} in {path}"
    values = {key: _value(key, value, source, environ) for key, value in profiles[name].items()}
    url = values.pop("url", None)
    if not isinstance(url, str):
        message = f'{source}: url is missing or not a string: write url = "redis://…"'
        raise ConfigurationError(message)
    return _from_url(url, {**values, **{key: value for key, value in options.items() if value is not None}}, source)


def _search(start: Path) -> tuple[Path, object] | None:
    """Find the nearest configuration file; return its path and its table."""
    for directory in (start, *start.parents):
        path = directory / "lockkit.toml"
        table = _read(path)
        if table is not None:
            return path, table
        path = directory / "pyproject.toml"
        tools = (_read(path) or {}).get("tool")
        if isinstance(tools, dict) and "lockkit" in tools:
            return path, tools["lockkit"]
    return None


def _read(path: Path) -> dict[str, Any] | None:
    """Read a TOML file; None if there is no such file."""
    try:
        text = path.read_bytes().decode("utf-8-sig")  # editors and shells on Windows write a byte order mark
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read {path}: {error}"
        raise ConfigurationError(message) from error
    import tomllib  # noqa: PLC0415 - `import lockkit` stays light

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits; thousands of brackets
        # The error names line and column, except at the end of the file.
        end = "" if " line " in str(error) else f", line {text.count(chr(10)) + 1}"
        message = f"{path} is not valid TOML: {error}{end}"
        raise ConfigurationError(message) from error


def _profiles(path: Path, table: object) -> dict[str, dict[str, object]]:
    """Check the form of a configuration file and return its profiles."""
    prefix = "tool.lockkit." if path.name == "pyproject.toml" else ""
    if not isinstance(table, dict):
        message = f"{path}: tool.lockkit must be a table with [{prefix}profiles.NAME] in it"
        raise ConfigurationError(message)
    unknown = [key for key in table if key != "profiles"]
    if unknown:
        message = (
            f"{path}: unknown key {shown(unknown[0])}{nearest(unknown[0], ['profiles'])}. "
            f"Put settings into a profile: [{prefix}profiles.NAME]"
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
