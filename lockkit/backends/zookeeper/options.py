"""The options of ``zookeeper:`` URLs, and the arguments for kazoo's client that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kazoo.protocol.paths import normpath
from kazoo.security import ACL, CREATOR_ALL_ACL, OPEN_ACL_UNSAFE, Id, Permissions

from lockkit import validation
from lockkit.backend import Option
from lockkit.backends.zookeeper.connection import TLS_FILES, tls_context
from lockkit.errors import ConfigurationError
from lockkit.url import HostPort, Url

if TYPE_CHECKING:
    from kazoo.client import KazooClient

DEFAULT_PORT = 2181

_PERMISSIONS = {
    "c": Permissions.CREATE,
    "r": Permissions.READ,
    "w": Permissions.WRITE,
    "d": Permissions.DELETE,
    "a": Permissions.ADMIN,
}
_ACL_HELP = (
    "it must be open (everybody), creator (clients with the same login), or a list such as "
    "digest:USER:HASH:cdrwa,ip:10.0.0.0/8:r"
)


def parse_prefix(value: object) -> str:
    """Parse the option ``prefix``: a path without its leading slash."""
    text = validation.parse_text(value)
    parts = [part for part in text.split("/") if part]
    if not parts or parts[0] == "zookeeper" or {".", ".."} & {*parts} or not text.isprintable():
        raise ValueError("it must be a path such as lockkit or team/locks, and not in ZooKeeper's own /zookeeper")
    return "/".join(parts)


def parse_acl(value: object) -> list[ACL]:
    """Parse the option ``acl``: a string, or a list of kazoo's ``ACL``."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(one, ACL) for one in value):
        return [*value]
    if not isinstance(value, str):
        raise TypeError(_ACL_HELP)
    known = {"open": OPEN_ACL_UNSAFE, "creator": CREATOR_ALL_ACL}.get(value)
    return [*known] if known else [_parse_access(part) for part in value.split(",")]


def _parse_access(text: str) -> ACL:
    scheme, _, rest = text.partition(":")
    identity, _, letters = rest.rpartition(":")
    if not scheme or not letters or not set(letters) <= set(_PERMISSIONS):
        raise ValueError(_ACL_HELP)
    return ACL(sum(_PERMISSIONS[letter] for letter in set(letters)), Id(scheme, identity))


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "prefix": Option(parse_prefix, "Directory of the locks: the same for all clients that share locks.", "lockkit"),
        "acl": Option(
            parse_acl,
            "Access rights to the nodes: open, creator, or SCHEME:ID:cdrwa,… Default: creator with a login, else open.",
            None,
        ),
        "auth": Option(
            validation.parse_choice("digest", "sasl"),
            "How user and password of the URL are used: digest, sasl.",
            "digest",
        ),
        "cleanup": Option(
            validation.parse_bool,
            "Remove the directories of unused locks. Off: they stay, as with kazoo's Lock.",
            True,  # noqa: FBT003 - a default
        ),
    }
)


_TLS = (*TLS_FILES, "keyfile_password", "verify_certs", "check_hostname")

_DRIVER_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys((*TLS_FILES, "keyfile_password"), validation.parse_text),
    **dict.fromkeys(("use_ssl", "verify_certs", "check_hostname", "randomize_hosts"), validation.parse_bool),
    **dict.fromkeys(("auth_data", "sasl_options"), lambda value: value),
}
DRIVER_OPTIONS = {name: Option(parse, "Passed on to kazoo's client.") for name, parse in _DRIVER_PARSERS.items()}
"""The arguments of ``KazooClient`` that users may set. lockkit sets all others itself."""


def client_arguments(url: Url, options: Mapping[str, Any]) -> dict[str, Any]:
    """Give the keyword arguments for ``KazooClient``, the **password** among them."""
    if not url.hosts:
        raise _wrong(url, f"write {url.scheme}://host1:{DEFAULT_PORT},host2/chroot")
    arguments = {name: value for name, value in options.items() if name not in OPTIONS}
    _check_tls(url, arguments)
    _check_logins(url, arguments)
    arguments["hosts"] = ",".join(str(HostPort(one.host, one.port or DEFAULT_PORT)) for one in url.hosts)
    url.require_one_login()
    if (url.username is None) != (url.password is None):
        raise _wrong(url, f"a login is a user and a password: {url.scheme}://user:password@host")
    if options["auth"] == "sasl":
        if url.username is None and "sasl_options" not in arguments:
            raise _wrong(url, "auth=sasl takes user and password of the URL, or sasl_options= of connect()")
        login = {"mechanism": "DIGEST-MD5", "username": url.username, "password": url.password}
        arguments.setdefault("sasl_options", login)
    elif url.username is not None:
        arguments["auth_data"] = [*arguments.get("auth_data", ()), ("digest", f"{url.username}:{url.password}")]
    if "sasl_options" in arguments and find_spec("puresasl") is None:
        raise _wrong(url, "a login by SASL needs the package pure-sasl: python -m pip install pure-sasl")
    has_login = bool(arguments.get("auth_data") or "sasl_options" in arguments)
    arguments["default_acl"] = options["acl"] or [*(CREATOR_ALL_ACL if has_login else OPEN_ACL_UNSAFE)]
    return arguments


def _check_tls(url: Url, arguments: dict[str, Any]) -> None:
    given = next((name for name in _TLS if name in arguments), None)
    if given is not None and "use_ssl" not in arguments:
        raise _wrong(url, f"the option {given} is for TLS: add use_ssl=1")
    if arguments.get("use_ssl"):
        # kazoo's own default takes a certificate of any host: its owner could read the password and relay the locks.
        verified = arguments.get("verify_certs", True)
        if arguments.setdefault("check_hostname", verified) and not verified:
            raise _wrong(url, "check_hostname=1 checks a name in a certificate that verify_certs=0 does not check")
        try:
            tls_context(arguments)
        except ValueError as error:
            raise _wrong(url, str(error)) from None


def _check_logins(url: Url, arguments: Mapping[str, Any]) -> None:
    """Check what only `connect` can give, without showing it."""
    pairs = arguments.get("auth_data", [])
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(one, (list, tuple)) for one in pairs):
        raise _wrong(url, "auth_data= of connect() is a list of pairs: scheme and credential")
    sasl = arguments.get("sasl_options", {"mechanism": "none"})
    if not isinstance(sasl, Mapping) or "mechanism" not in sasl:
        raise _wrong(url, "sasl_options= of connect() is a mapping with a mechanism, as kazoo's client takes it")


def root_of(url: Url, prefix: str) -> str:
    """Give the directory of the locks: the chroot of the URL, and the prefix in it."""
    try:
        chroot = normpath(url.path)
    except ValueError as error:
        raise _wrong(url, f"its path is not a ZooKeeper path ({error})") from error
    return f"{chroot.rstrip('/')}/{prefix}"


def _wrong(url: Url, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{url.safe_text} is not understood: {problem}", backend=url.safe_text)


def adopted_arguments(client: KazooClient, options: Mapping[str, Any]) -> dict[str, Any]:
    """Give the keyword arguments for sessions of lockkit's own, as an application's client connects and logs in."""
    for name, instead in (("acl", "default_acl=, which lockkit uses, too"), ("auth", "sasl_options= or auth_data=")):
        if options[name] != OPTIONS[name].default:
            raise ConfigurationError(f"the option {name} is for URLs: give the KazooClient {instead}")
    same = ("auth_data", "randomize_hosts", "use_ssl", *_TLS)
    login = client._connection.sasl_options  # noqa: SLF001 - kazoo has no public way
    arguments = {"hosts": client_label(client), **{name: getattr(client, name) for name in same}, "sasl_options": login}
    arguments["default_acl"] = client.default_acl or [*OPEN_ACL_UNSAFE]
    return arguments


def client_label(client: KazooClient) -> str:
    """Give the servers of an application's client, for messages."""
    return ",".join(str(HostPort(host, port)) for host, port in client.hosts)
