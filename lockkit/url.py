"""
The grammar of backend URLs: a pure function, `parse`, and what it returns.

::

    scheme:                                            file:
    scheme:/path                                       file:/var/lock/app
    scheme://[user[:password]@]host[:port][,…][/path][?name=value[&…]]

- ``scheme`` keeps its ``+part``: the registry decides whether that is a scheme of its own or a driver.
- Several hosts: the first host's user information also applies to later hosts that have none of their own; ``@h2`` has
  empty user information. If a host has user information, every host before it must have an ``@``, if only an empty
  one: otherwise a comma in a password would turn its beginning into hosts.
- IPv6 addresses are in brackets.
- User name, password, host, path and query are percent-decoded; ``+`` in a query is a space, as in HTML forms.
- A password with ``, / ?`` or ``%`` in it must be percent-encoded.
- An ``@`` after the hosts must be percent-encoded, except in the path of a file (``file:///home/me@work``).

Secrets: the exceptions of this module show only the scheme of a URL. In a malformed URL any part may be the password:
in ``redis://u:pa/ss@host`` it is the "port". And ``repr`` and ``str`` of the result hide whatever is in the place of a
password or has the name of one; also hosts before the last ``@``, because in ``redis://u:p@s,s@host`` they are parts of
the password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lockkit.errors import ConfigurationError
from lockkit.validation import percent_decode

__all__ = ["HIDDEN", "HostPort", "Url", "is_secret", "parse"]

HIDDEN = "***"
"""What messages show instead of a password."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*")
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\s]")
# "password" also mistyped: an unknown option is shown with the URL, and its value is a password all the same.
_SECRET = re.compile(r"pas|paw|pss|psw|pwd|word|(^|_)pw($|_)|secret|token|credential|auth|key$|(^|[-_])sig(nature)?$")
_FILES = frozenset({"file", "sqlite", "unix"})  # the path is that of a file, in which an @ is an ordinary character
_PLAIN_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_PORT_DIGITS_MAX = 5
_PORT_MAX = 65535


def is_secret(name: str) -> bool:
    """Return whether the value of this option must be hidden in messages."""
    return _SECRET.search(name.lower()) is not None


@dataclass(frozen=True, slots=True)
class HostPort:
    """
    One server of a URL.

    Attributes:
        host: Name or address (IPv6 without its brackets).
        port: 1 to 65535, or None for the backend's default.
        username: Its own or the URL's common one; None if there is none.
        password: As `username`.
    """

    host: str
    port: int | None = None
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Return ``host:port``, without credentials."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, repr=False)
class Url:
    """
    A parsed URL. Made by `parse`.

    Attributes:
        scheme: In lower case, with its ``+part``: ``redis``, ``redis+sentinel``, ``postgresql+psycopg``.
        hosts: The servers, in order; empty where the URL has none (``file:///path``).
        username: Of the first host, or of a URL without host (``unix://user@/path``); None if there is none.
            In ``redis://word@host`` it is ``word``, even if that is meant to be the password.
        password: As `username`.
        path: Percent-decoded, with its leading slash: ``/0``; empty if there is none.
        raw_path: The path as written.
        query: Names and values, decoded, in order; each name once.
        text: The whole URL as given. **Holds the password.**
        safe_text: The whole URL without passwords.
    """

    scheme: str
    hosts: tuple[HostPort, ...]
    username: str | None
    password: str | None
    path: str
    raw_path: str
    query: tuple[tuple[str, str], ...]
    text: str
    safe_text: str

    @property
    def base(self) -> str:
        """The scheme up to its ``+``."""
        return self.scheme.partition("+")[0]

    @property
    def driver(self) -> str | None:
        """The scheme after its ``+``, or None."""
        return self.scheme.partition("+")[2] or None

    @property
    def host(self) -> str | None:
        """The first host's name or address, or None."""
        return self.hosts[0].host if self.hosts else None

    @property
    def port(self) -> int | None:
        """The first host's port, or None."""
        return self.hosts[0].port if self.hosts else None

    def redacted(self) -> str:
        """Return the URL with ``***`` for each password: in the user information, and in options named like one."""
        return self.safe_text

    def require_one_login(self) -> None:
        """
        Refuse different user information for several hosts, which only independent servers (Redlock) may have.

        Raises:
            ConfigurationError: There is some. It may be a password with an ``@`` and a comma in it.
        """
        if any((one.username, one.password) != (self.username, self.password) for one in self.hosts):
            problem = (
                "all its servers must have the same user and password: give them once, in front, "
                "and write an @ in a password as %40, a comma as %2C"
            )
            raise ConfigurationError(f"{self.safe_text} is not understood: {problem}", backend=self.safe_text)

    def __str__(self) -> str:
        """See `redacted`."""
        return self.safe_text

    def __repr__(self) -> str:
        """See `redacted`."""
        return f"Url({self.safe_text!r})"


def parse(text: object) -> Url:
    """
    Parse a backend URL. No I/O.

    Args:
        text: The URL; see the module for its grammar.

    Returns:
        Its parts.

    Raises:
        ConfigurationError: The URL is malformed. The message shows only the scheme.
    """
    text, scheme, rest = _split_scheme(text)
    authority = None
    if rest.startswith("//"):
        end = min(index for index in (rest.find("/", 2), rest.find("?", 2), len(rest)) if index >= 0)
        authority, rest = rest[2:end], rest[end:]
    elif rest and rest[0] not in "/?":
        if "@" in rest:
            raise _no_scheme()  # user:password@host
        slashes = "///" if scheme.partition("+")[0] in _FILES else "//"
        problem = f"has no // after its scheme: write {scheme}:{slashes}…"
        if rest[0].isdigit():  # host:port
            problem += f"; if {scheme} is a host, put a scheme before it, such as redis://{scheme}:…"
        raise _error(scheme, problem)
    raw_path, question, raw_query = rest.partition("?")
    # A raw "/" or "?" in a password ends the host part early, so the "@" comes after it. Without this check a message
    # would show the rest of the password as a path or an option.
    user, at, _ = raw_path.rpartition("@")
    is_file = authority == "" and scheme.partition("+")[0] in _FILES and ":" not in user
    if "@" in raw_query or (at and not is_file):
        problem = "has an @ after its host part: percent-encode it (%40), and in a password also / (%2F) and ? (%3F)"
        raise _error(scheme, problem)
    hosts, (username, password), safe_authority = _parse_authority(scheme, authority or "")
    query, safe_query = _parse_query(scheme, raw_query)
    return Url(
        scheme=scheme,
        hosts=hosts,
        username=username,
        password=password,
        path=_decode(scheme, raw_path, "path"),
        raw_path=raw_path,
        query=query,
        text=text,
        safe_text=f"{scheme}:{'' if authority is None else '//'}{safe_authority}{raw_path}{question}{safe_query}",
    )


def _no_scheme() -> ConfigurationError:
    # The message shows no part of the text: it may be a password in the wrong variable.
    return ConfigurationError(
        "the backend URL does not start with a scheme: write one such as redis://host:6379/0 or file:///directory"
    )


def _error(scheme: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"the backend URL ({scheme}:…) {problem}")


def _split_scheme(text: object) -> tuple[str, str, str]:
    """Check the whole text; return it, its scheme in lower case, and what follows the first colon."""
    if not isinstance(text, str):
        message = f"a backend URL must be a str, not {type(text).__name__}: give one such as redis://localhost:6379/0"
        raise ConfigurationError(message)
    if not text:
        message = (
            "the backend URL is empty: give one such as redis://localhost:6379/0, or file: for the embedded backend"
        )
        raise ConfigurationError(message)
    if text[0] in "\"'":  # docker run --env-file and others keep them
        raise ConfigurationError("the backend URL begins with a quotation mark: remove the quotation marks around it")
    scheme, colon, rest = text.partition(":")
    if not colon or not _SCHEME.fullmatch(scheme):
        raise _no_scheme()
    scheme = scheme.lower()
    if _FORBIDDEN.search(text):
        raise _error(scheme, "must not contain a space or control character: remove it, or write a space as %20")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _error(scheme, "cannot be encoded as UTF-8 (it has a lone surrogate): remove that character") from None
    return text, scheme, rest


def _parse_authority(scheme: str, authority: str) -> tuple[tuple[HostPort, ...], tuple[str | None, str | None], str]:
    """Return the hosts, the common user name and password, and the text without passwords."""
    hosts: list[HostPort] = []
    safe: list[str] = []
    common: tuple[str | None, str | None] = (None, None)
    parts = authority.split(",") if authority else []
    with_user = [index for index, part in enumerate(parts) if "@" in part] or [0]
    for index, part in enumerate(parts):
        raw_user, at, raw_host = part.rpartition("@")
        # Before the first user information: a host without any, or the beginning of a password with a comma in it.
        if index < with_user[0] and not _PLAIN_HOST.fullmatch(part):
            problem = (
                f"has an invalid host (number {index + 1}) before its user information. If that is part of a password, "
                "percent-encode the comma (%2C)"
            )
            raise _error(scheme, problem)
        credentials = common
        if at:
            credentials = _parse_user(scheme, raw_user)
            if index == 0:
                common = credentials
        # A password with an @ and a comma in it reads like user information of several hosts.
        shown_user = _safe_user(raw_user) if index == 0 else HIDDEN if raw_user else ""
        shown_host = raw_host if index >= with_user[-1] else HIDDEN
        safe.append(f"{shown_user}{at}{shown_host}")
        if raw_host:
            hosts.append(_parse_host(scheme, raw_host, credentials))
        elif len(parts) > 1:
            # A user without a host is accepted in a URL without other hosts: postgresql://user@/db?host=/run/postgresql
            raise _error(
                scheme, f"has an empty host (number {index + 1} of {len(parts)}): write its name, or remove a comma"
            )
    return tuple(hosts), common, ",".join(safe)


def _parse_user(scheme: str, raw: str) -> tuple[str | None, str | None]:
    raw_name, _, raw_password = raw.partition(":")
    name = _decode(scheme, raw_name, "user name")
    password = _decode(scheme, raw_password, "password")
    return name or None, password or None


def _safe_user(raw: str) -> str:
    """Hide the password. A single word may be one, too: redis+sentinel://pw@host."""
    name, colon, password = raw.partition(":")
    if colon:
        return f"{name}:{HIDDEN if password else ''}"
    return HIDDEN if raw else ""


def _parse_host(scheme: str, raw: str, credentials: tuple[str | None, str | None]) -> HostPort:
    bracketed = raw.startswith("[")
    if bracketed:
        raw_host, bracket, tail = raw[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")):
            raise _error(scheme, "has an IPv6 address without its closing bracket: write [address] or [address]:port")
        raw_port = tail[1:] if tail else None
    else:
        raw_host, colon, port_text = raw.partition(":")
        raw_port = port_text if colon else None
        if raw_port is not None and ":" in raw_port:
            raise _error(scheme, "has a host with several colons: write an IPv6 address in brackets, [::1]:6379")
        if "[" in raw or "]" in raw:
            raise _error(scheme, "has a bracket in a host: write an IPv6 address as [address] or [address]:port")
    host = _decode(scheme, raw_host, "host")
    if bracketed and not _is_ipv6(host):
        raise _error(
            scheme, "has brackets around something that is not an IPv6 address: remove them or correct the address"
        )
    if not host:
        raise _error(scheme, "has a port without a host: write the host's name, for example localhost")
    return HostPort(host, None if raw_port is None else _parse_port(scheme, raw_port), *credentials)


def _is_ipv6(host: str) -> bool:
    from ipaddress import AddressValueError, IPv6Address  # noqa: PLC0415 - `import lockkit` stays light

    try:
        IPv6Address(host)
    except AddressValueError:
        return False
    return True


def _parse_port(scheme: str, raw: str) -> int:
    if raw.isascii() and raw.isdigit() and len(raw) <= _PORT_DIGITS_MAX and 1 <= int(raw) <= _PORT_MAX:
        return int(raw)
    # The message does not show the text: in redis://user:pa/ss@host it is the beginning of the password.
    problem = (
        f"has a port that is not a number from 1 to {_PORT_MAX} (if that is part of a password, percent-encode it)"
    )
    raise _error(scheme, problem)


def _parse_query(scheme: str, raw: str) -> tuple[tuple[tuple[str, str], ...], str]:
    """Return the names and values, and the text without passwords."""
    pairs: dict[str, str] = {}
    safe: list[str] = []
    for item in filter(None, raw.split("&")):
        raw_name, equals, raw_value = item.partition("=")
        name = _decode(scheme, raw_name.replace("+", " "), "query")
        if not equals or not name:
            raise _error(scheme, "has a malformed query: write name=value pairs joined by &")
        if name in pairs:
            raise _error(scheme, "must not have the same option twice in its query: remove one")
        value = pairs[name] = _decode(scheme, raw_value.replace("+", " "), "query")
        # A value with an @ in it may be a URL with a password.
        safe.append(f"{raw_name}={HIDDEN}" if is_secret(name) or "@" in value else item)
    return tuple(pairs.items()), "&".join(safe)


def _decode(scheme: str, raw: str, what: str) -> str:
    try:
        text = percent_decode(raw)
    except ValueError as error:
        raise _error(scheme, f"has a {what} with {error}") from None
    if "\0" in text:
        raise _error(scheme, f"has a {what} with a NUL character (%00): remove it")
    return text
