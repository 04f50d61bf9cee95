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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockkit import url as urls
from lockkit.errors import ConfigurationError
from lockkit.file_systems import find_flaw, find_flaw_on_the_way
from lockkit.validation import nearest, shown

log = logging.getLogger("lockkit")

DEFAULT_URL = "file:"
"""Used where there is no configuration: the file backend in `default_directory`."""

_GIVEN = "the given url"
_DEFAULT = "the default"

_FILES = ("lockkit.toml", "pyproject.toml")
"""Where profiles may be, in the order in which they win within one directory."""

_MEANT = {"PROFILE": "ENV", "ENVIRONMENT": "ENV", "BACKEND": "URL"}
"""What people may write after ``LOCKKIT_`` and what they mean, besides what nearly is one of `_CHOOSING`."""

_NEARLY = re.compile(r"LOCK+_?K?IT+_?(?P<word>\w+)", re.IGNORECASE)
"""``LOCKKIT_`` and what people write for it: LOCKIT_, LOCK_KIT_, LOCKKIT, lockkit_."""

_CHOOSING = ("URL", "ENV", "CONFIG")

_OTHER_VARIABLES = frozenset(
    f"LOCKKIT_{name}"
    for name in ("CONFIG", "SCOPE", "STATE_DIR", "DEBUG_ORDER", "NAME", "TOKEN", "OWNER", "DEADLINE", "ONCE", "BEAT")
)
"""Those that lockkit reads, and that ``lockkit run`` sets for its command."""

_REFERENCE = re.compile(r"(?P<literal>\$\$\{)|\$\{(?P<name>[^}]*)(?P<end>\}?)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Settings:
    """What `resolve` found."""

    url: urls.Url
    options: dict[str, Any] = field(repr=False)  # the profile's and ``connect``'s. May contain passwords
    source: str  # where the URL was given, for messages: profile 'prod' in /srv/app/lockkit.toml

    @property
    def elsewhere(self) -> str:
        """`source` if the caller has to look there for what is wrong: not if the call or nobody gave the URL."""
        return "" if self.source in {_GIVEN, _DEFAULT} else self.source

    def shows_secret(self, url: str | None, options: Mapping[str, object]) -> bool:
        """Whether the arguments of ``connect`` have a password, and not the environment or a profile."""
        return (url is not None and self.url.text != self.url.safe_text) or any(map(urls.is_secret, options))

    @property
    def embedded(self) -> bool:
        """Whether nothing names a backend, so that locks are files of this user on this machine."""
        return self.source == _DEFAULT


def resolve(url: str | None, profile: str | None, options: Mapping[str, object]) -> Settings:
    """Decide which backend to use; the module's docstring has the order. Reads files, but asks no server."""
    if url is not None:
        if profile is not None:
            log.warning("the given url decides, so the profile %s and its options are not used", shown(profile))
        return _settings(url, options, _GIVEN)
    if profile is not None:
        return _from_profile(profile, options, "profile=")
    from_environment = _variable("LOCKKIT_URL")
    if from_environment is not None:
        return _settings(from_environment, options, "LOCKKIT_URL")
    profile = _variable("LOCKKIT_ENV")
    if profile is not None:
        return _from_profile(profile, options, "LOCKKIT_ENV")
    configuration = _find()
    _warn_of_misspelled("locks are files of this machine" if configuration is None else f"{configuration[0]} decides")
    if configuration is None:
        log.debug("nothing names a backend, so locks are files of this machine")
        return _settings(DEFAULT_URL, options, _DEFAULT)
    return _from_file(*configuration, "default", options, None)


def _warn_of_misspelled(otherwise: str) -> None:
    """
    Log a warning if a variable was probably meant to choose the backend, and no other variable chooses one.

    No error: the application may have variables of its own, and Kubernetes sets LOCKKIT_PORT for a service named so.
    """
    for name in os.environ:
        written = _NEARLY.fullmatch(name)
        if written is None or name in _OTHER_VARIABLES:
            continue
        import difflib  # noqa: PLC0415 - `import lockkit` stays light

        word = written["word"].upper()
        for meant in difflib.get_close_matches(_MEANT.get(word, word), _CHOOSING, n=1):
            text = "%s is set, which lockkit does not read: did you mean LOCKKIT_%s? Without that, %s"
            log.warning(text, name, meant, otherwise)


def default_directory() -> Path:
    """
    Return where the embedded file backend keeps its records by default. The directory need not exist.

    ``LOCKKIT_STATE_DIR``; else ``~/.local/state/lockkit``, on macOS ``~/Library/Application Support/lockkit``. The home
    directory is that of the user database: HOME and XDG_STATE_HOME differ between a shell and cron, whose programs must
    exclude each other.
    """
    import pwd  # noqa: PLC0415 - only on Unix

    # A relative path would mean another directory, and so another set of locks, for each working directory.
    chosen = _variable("LOCKKIT_STATE_DIR")
    if chosen is not None:
        if not Path(chosen).is_absolute():
            raise ConfigurationError(f"LOCKKIT_STATE_DIR must be an absolute path, not {shown(chosen)}")
        return Path(chosen)
    homes = [os.environ.get("HOME", "")]
    with suppress(KeyError):  # a user id without an entry, as containers have it
        homes.insert(0, pwd.getpwuid(os.getuid()).pw_dir)
    for home in homes:
        if Path(home).is_absolute():
            state = "Library/Application Support" if sys.platform == "darwin" else ".local/state"
            return Path(home) / state / "lockkit"
    raise ConfigurationError(
        "there is no home directory for the embedded file backend: set LOCKKIT_STATE_DIR, "
        "or give a URL such as file:///var/lock/app"
    )


def _variable(name: str) -> str | None:
    value = os.environ.get(name)
    if value == "":
        raise ConfigurationError(f"{name} is set but empty: unset it, or give it a value")
    return value


def _settings(url: str, options: Mapping[str, object], source: str, *, expanded: bool = False) -> Settings:
    """Parse the URL. Only a profile expands what is in it."""
    if not expanded and "${" in str(url):
        raise ConfigurationError(
            f"{source} has a ${{ in it, which only a profile expands: put the URL into a profile of lockkit.toml, or "
            "expand it first (os.path.expandvars, or double quotes in a shell). Write %24%7B for a literal ${"
        )
    try:
        parsed = urls.parse(url)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}") from None
    return Settings(parsed, {name: value for name, value in options.items() if value is not None}, source)


def _from_profile(name: object, options: Mapping[str, object], origin: str) -> Settings:
    """Take the settings from the profile that `origin` asks for."""
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"profile must be the name of a profile, not {shown(name)}")
    if "://" in name or "@" in name:
        # The message does not show it: it may have a password.
        instead = "url" if origin == "profile=" else "LOCKKIT_URL"
        message = f"{origin} must be the name of a profile, and this looks like a URL: give it as {instead}"
        raise ConfigurationError(message)
    found = _find()
    if found is None:
        raise ConfigurationError(
            f"{origin} asks for the profile {shown(name)}, but neither {_working_directory()} nor a directory above it "
            f'has a lockkit.toml (or a pyproject.toml with [tool.lockkit]). Write one with [profiles.{name}] url = "…"'
        )
    return _from_file(*found, name, options, origin)


def _from_file(
    path: Path, table: Mapping[str, object], name: str, options: Mapping[str, object], origin: str | None
) -> Settings:
    """Take the settings from a profile of a file; without an origin, nothing chooses a profile."""
    prefix = "tool.lockkit." if path.name == "pyproject.toml" else ""
    unknown = [key for key in table if key != "profiles"]
    if unknown:
        raise ConfigurationError(
            f"{path}: unknown key {shown(unknown[0])}{nearest(unknown[0], ['profiles'])}. "
            f"Settings belong into a profile, [{prefix}profiles.NAME]: [{prefix}profiles.default] is used if nothing "
            "chooses another"
        )
    profiles = table.get("profiles", {})
    if not isinstance(profiles, dict) or not all(isinstance(value, dict) for value in profiles.values()):
        raise ConfigurationError(f'{path}: a profile must be a table: [{prefix}profiles.NAME] and below it url = "…"')
    if name not in profiles:
        wanted = "nothing chooses a profile, and the profile 'default'"
        if origin is not None:
            wanted = f"{origin} asks for the profile {shown(name)}, which"
        known = ", ".join(profiles) or "none"
        raise ConfigurationError(
            f"{wanted} is not in {path}{nearest(name, list(profiles))}. Its profiles are {known}: choose one "
            f"with LOCKKIT_ENV or profile=, or add [{prefix}profiles.{name}] with a url"
        )
    source = f"profile {name!r} in {path}"
    values = {key: _expand(key, value, source) for key, value in profiles[name].items()}
    url = values.pop("url", None)
    if not isinstance(url, str):
        raise ConfigurationError(f'{source}: url is missing or not a string: write url = "redis://…"')
    given = {key: value for key, value in options.items() if value is not None}
    return _settings(url, values | given, source, expanded=True)


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise ConfigurationError(
            f"the working directory, where the search for lockkit.toml begins, cannot be found: {error}. Change to one "
            "that exists, or name the backend by a URL or LOCKKIT_URL"
        ) from error


def _find() -> tuple[Path, dict[str, Any]] | None:
    """Find the configuration; return its path and its table."""
    chosen = _variable("LOCKKIT_CONFIG")
    if chosen is not None:
        path = Path(chosen)
        table = _load(path, chosen=True)
        if table is None:
            problem = "has no [tool.lockkit]" if path.exists() else "does not exist"
            raise ConfigurationError(f"LOCKKIT_CONFIG names {path}, which {problem}")
        return path, table
    start = _working_directory()
    for path in (above / name for above in (start, *start.parents) for name in _FILES):
        table = _load(path)
        if table is not None:
            return path, table
    return None


def _load(path: Path, *, chosen: bool = False) -> dict[str, Any] | None:
    """
    Return lockkit's table of a TOML file; None if there is no such file, or no such table in a ``pyproject.toml``.

    One that another user could have written is refused; with `chosen` (``LOCKKIT_CONFIG``), its group or anybody.
    """
    try:
        with open(path, "rb", opener=_open) as file:
            status = os.fstat(file.fileno())  # of what was opened: what the name means may change
            if not stat.S_ISREG(status.st_mode):
                raise ConfigurationError(f"cannot read {path}: it is not a regular file")
            data = file.read()
        flaw = find_flaw(str(path), status, owners=frozenset({status.st_uid} if chosen else ()))
        if flaw is None and not chosen:
            flaw = find_flaw_on_the_way(str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        remedy = "" if chosen else ": change the directory, or set LOCKKIT_URL or LOCKKIT_CONFIG"
        raise ConfigurationError(f"cannot read {path}: {error}{remedy}") from error
    if path.name != "pyproject.toml":
        table: object = _parse(path, data)
    else:
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
    if not isinstance(table, dict):
        raise ConfigurationError(f"{path}: tool.lockkit must be a table with [tool.lockkit.profiles.NAME] in it")
    return table


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO must not block


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    import tomllib  # noqa: PLC0415 - `import lockkit` stays light

    text = ""
    try:
        text = data.decode("utf-8-sig")  # editors and shells on Windows write a byte order mark
        return tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits; thousands of brackets
        # The error names line and column, except at the end of the file.
        end = "" if " line " in str(error) else f", line {text.count(chr(10)) + 1}"
        raise ConfigurationError(f"{path} is not valid TOML: {error}{end}") from error


def _expand(key: str, value: object, source: str) -> object:
    """Replace environment variables in a text. Messages show neither it nor a value: both may contain a password."""
    if isinstance(value, (bool, int, float)):
        return value
    if not isinstance(value, str):
        message = f"{source}: {key} must be a string, a number, true or false, not {type(value).__name__}"
        raise ConfigurationError(message)

    def replace(match: re.Match[str]) -> str:
        if match["literal"]:
            return "${"
        name = match["name"]
        if not match["end"] or not _VARIABLE.fullmatch(name):
            message = f"{source}: {key} has a ${{ without the name of a variable and a }}; $${{ is a literal ${{"
            raise ConfigurationError(message)
        if not os.environ.get(name):
            state = "is not set" if name not in os.environ else "is empty"
            raise ConfigurationError(f"{source}: {key} needs the environment variable {name}, which {state}")
        return os.environ[name]

    return _REFERENCE.sub(replace, value)
