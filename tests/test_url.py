from __future__ import annotations

import pickle
import re
from dataclasses import FrozenInstanceError
from urllib.parse import quote

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import lockkit
from lockkit.errors import ConfigurationError
from lockkit.url import HostPort, Url, parse


def show(url: Url) -> str:
    """Write the hosts of a URL with everything that belongs to them."""
    return " ".join(f"{host.username}:{host.password}@{host.host}:{host.port}" for host in url.hosts)


@pytest.mark.parametrize(
    ("text", "scheme", "hosts", "path", "query"),
    [
        ("memory://", "memory", "", "", {}),
        ("memory:", "memory", "", "", {}),
        ("memory://name", "memory", "None:None@name:None", "", {}),
        ("file:", "file", "", "", {}),
        ("file:?ttl=5", "file", "", "", {"ttl": "5"}),
        ("file://?ttl=5", "file", "", "", {"ttl": "5"}),
        ("FILE:///var/lock/app", "file", "", "/var/lock/app", {}),
        ("file:/var/lock/app", "file", "", "/var/lock/app", {}),
        ("file:///tmp/a%20b@c#d", "file", "", "/tmp/a b@c#d", {}),  # noqa: S108
        ("file:///tmp/100%", "file", "", "/tmp/100%", {}),  # noqa: S108
        ("sqlite:///rel.db", "sqlite", "", "/rel.db", {}),
        ("sqlite:////abs.db", "sqlite", "", "//abs.db", {}),
        ("sqlite://", "sqlite", "", "", {}),
        ("unix:///path.sock?db=0", "unix", "", "/path.sock", {"db": "0"}),
        ("redis://h", "redis", "None:None@h:None", "", {}),
        ("redis://h:6379/0", "redis", "None:None@h:6379", "/0", {}),
        ("redis://u:p@h:1/0?ttl=5&prefix=a:", "redis", "u:p@h:1", "/0", {"ttl": "5", "prefix": "a:"}),
        ("redis://:p@h", "redis", "None:p@h:None", "", {}),
        ("redis://u@h", "redis", "u:None@h:None", "", {}),
        ("redis://u:@h", "redis", "u:None@h:None", "", {}),
        ("redis://@h", "redis", "None:None@h:None", "", {}),
        ("redis://u:p@ss@h", "redis", "u:p@ss@h:None", "", {}),
        ("redis://u:p:q#r@h", "redis", "u:p:q#r@h:None", "", {}),
        ("redis://%C3%A9:a%2Fb%3F%40%2C@h", "redis", "é:a/b?@,@h:None", "", {}),
        ("redis://[::1]:6379/0", "redis", "None:None@::1:6379", "/0", {}),
        ("redis://u:p@[fe80::1%25eth0]", "redis", "u:p@fe80::1%eth0:None", "", {}),
        (
            "redis+sentinel://pw@h1:26379,h2,h3/m/0",
            "redis+sentinel",
            "pw:None@h1:26379 pw:None@h2:None pw:None@h3:None",
            "/m/0",
            {},
        ),
        (
            "redlock://u:p@h1,x:y@h2:2,:z@h3,@h4,h5",
            "redlock",
            "u:p@h1:None x:y@h2:2 None:z@h3:None None:None@h4:None u:p@h5:None",
            "",
            {},
        ),
        ("redlock://@h1,u:p@h2,h3", "redlock", "None:None@h1:None u:p@h2:None None:None@h3:None", "", {}),
        ("redlock://h1:1,u:p@h2,h3", "redlock", "None:None@h1:1 u:p@h2:None None:None@h3:None", "", {}),
        ("redlock://u:p@h1,h2,v:q@h3", "redlock", "u:p@h1:None u:p@h2:None v:q@h3:None", "", {}),
        ("file:///home/me@work/locks", "file", "", "/home/me@work/locks", {}),
        ("sqlite:////home/me@work/a:b.db", "sqlite", "", "//home/me@work/a:b.db", {}),
        ("unix://u:p@/run/x.sock", "unix", "", "/run/x.sock", {}),
        ("redis://h?prefix=me%40work", "redis", "None:None@h:None", "", {"prefix": "me@work"}),
        ("redlock://[::1]:1,[::2]", "redlock", "None:None@::1:1 None:None@::2:None", "", {}),
        ("zk://h1:2181,h2/chroot", "zk", "None:None@h1:2181 None:None@h2:None", "/chroot", {}),
        (
            "postgresql+psycopg://u:p@h/db?sslmode=require",
            "postgresql+psycopg",
            "u:p@h:None",
            "/db",
            {"sslmode": "require"},
        ),
        ("postgresql://u@/db?host=/run/pg", "postgresql", "", "/db", {"host": "/run/pg"}),
        ("postgresql://%2Frun%2Fpg/db", "postgresql", "None:None@/run/pg:None", "/db", {}),
        (
            "redis://h?a=b=c&d=&e=x+y%2Bz&&f=%26",
            "redis",
            "None:None@h:None",
            "",
            {"a": "b=c", "d": "", "e": "x y+z", "f": "&"},
        ),
        ("redis://h?", "redis", "None:None@h:None", "", {}),
        ("redis://h/?x=/a?b", "redis", "None:None@h:None", "/", {"x": "/a?b"}),
    ],
)
def test_parts_of_a_url(text: str, scheme: str, hosts: str, path: str, query: dict[str, str]) -> None:
    """The table of all forms."""
    url = parse(text)

    assert (url.scheme, show(url), url.path, dict(url.query)) == (scheme, hosts, path, query)
    assert url.text == text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty"),
        (None, "must be a str, not NoneType"),
        (b"redis://h", "must be a str, not bytes"),
        *((text, "does not start with a scheme") for text in (
            "localhost", "/var/lock", "://h", "1redis://h", "re dis://h", "rédis://h", " redis://h", "redis:ss@h",
            "redis:\\\\u:ss@h")),
        ("localhost:6379/0", "no // after its scheme"),
        *((text, "remove the quotation marks around it") for text in ('"redis://:hunter2@h"', "'redis://:hunter2@h'")),
        ("redis.example:6379", "if redis.example is a host, put a scheme before it, such as redis://redis.example:…"),
        ("file:relative", "no // after its scheme: write file:///…"),
        *((f"redis://{text}", "space or control character") for text in ("h ", "h\n", "a b", "a\x7fb", "a\u00a0b")),
        ("redis://a\udc80", "surrogate"),
        *((f"redis://h:{port}", "port") for port in ("", "0", "65536", "-1", "x", "\uff16", "000001")),
        ("redis://:6379", "port without a host"),
        ("redis://h1,,h2", "empty host \\(number 2 of 3\\)"),
        ("redis://h1,", "empty host \\(number 2 of 2\\)"),
        ("redis://,h1", "empty host \\(number 1 of 2\\)"),
        ("redis://,", "empty host"),
        ("redis://u:p@,h1", "empty host"),
        *((f"redis://{text}", "without its closing bracket") for text in ("[::1", "[::1]6379")),
        ("redis://[::1]:", "port"),
        *((f"redis://[{text}]", "not an IPv6 address") for text in ("", "localhost", "1.2.3.4")),
        *((f"redis://{text}", "IPv6 address in brackets") for text in ("::1", "::1:6379")),
        *((f"redis://{text}", "bracket") for text in ("h]", "a[b")),
        *((f"redis://h?{text}", "name=value") for text in ("ttl", "=5")),
        *((f"redis://h?{text}", "twice") for text in ("ttl=5&ttl=6", "ttl=5&%74tl=6")),
        ("redis://h/%ff", "path with percent-encoded bytes that are not UTF-8"),
        ("redis://u:%ff@h", "password with percent-encoded bytes that are not UTF-8"),
        *((f"redis://{text}", "NUL") for text in ("h/%00", "%00", "h?a=%00")),
        *((f"redis://{text}", "percent-encode") for text in ("u:pa/ss@h", "u:pa,ss@h", "u:1,ss%2,:p,1@h")),
        ("redis://u:pa,ss@h", "percent-encode the comma"),
        ("redlock://h1,u:p,u:p@h2,h3", "number 2"),
        *((text, "@ after its host part") for text in (
            "redis://u:1/ss@h", "redis://u:1?ss@h", "redis://?1=ss@h:1/0", "redis:///ss@h:1/0", "redis://h/0#u:ss@h",
            "file://?a=ss@h", "file:/home/me@work", "sqlite:///u:ss@h/db", "unix:///run/u:ss@h")),
    ],
)  # fmt: skip
def test_malformed_url_is_refused(text: object, part: str) -> None:
    """With what is wrong with it."""
    with pytest.raises(ConfigurationError, match=part):
        parse(text)


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("file:", "file:"),
        ("memory://", "memory://"),
        ("REDIS://u:p%40x@h:1/0?ttl=5", "redis://u:***@h:1/0?ttl=5"),
        ("redis://:p@h", "redis://:***@h"),
        ("redis://u:@h", "redis://u:@h"),
        ("redis://@h", "redis://@h"),
        ("redis+sentinel://pw@h1,h2/m", "redis+sentinel://***@h1,h2/m"),
        # Perhaps a host, perhaps the beginning of a password with a comma in it.
        ("redlock://u:1,ss@h", "redlock://***,***@h"),
        # Perhaps user information of several hosts, perhaps a password with an @ and then a comma in it.
        ("redlock://a:b@[::1]:1,c:d@h2,h3", "redlock://a:***@***,***@h2,h3"),
        ("redlock://:s@s,@s,s@h", "redlock://:***@***,@***,***@h"),
        (
            "x://h?sentinel_password=a&SSLPassword=b&auth_token=c&p%61ss=d&e=f",
            "x://h?sentinel_password=***&SSLPassword=***&auth_token=***&p%61ss=***&e=f",
        ),
        ("x:?aws_secret=a&api_key=b&passphrase=c", "x:?aws_secret=***&api_key=***&passphrase=***"),
        ("x:?pasword=a&pssword=b&paswd=c&apssword=d", "x:?pasword=***&pssword=***&paswd=***&apssword=***"),
        ("x:?psswd=a&pawssord=b&sentinel_pasword=c", "x:?psswd=***&pawssord=***&sentinel_pasword=***"),
        ("x:?auth=a&sasl_pw=b&pw=c&power=d", "x:?auth=***&sasl_pw=***&pw=***&power=d"),
        (
            "az:?sv=1&sig=a&X-Amz-Signature=b&assign=c&design=d",
            "az:?sv=1&sig=***&X-Amz-Signature=***&assign=c&design=d",
        ),
        ("x:?sentinel=redis%3A//u%3Ap%40h", "x:?sentinel=***"),
    ],
)
def test_redacted_hides_every_password_and_nothing_else(text: str, redacted: str) -> None:
    """In the user information by place, in the query by name; `str` and `repr` are redacted too."""
    url = parse(text)

    assert url.redacted() == redacted
    assert str(url) == redacted
    assert repr(url) == f"Url({redacted!r})"


def test_repr_of_a_host_has_no_credentials() -> None:
    """A dataclass would show every field."""
    (host,) = parse("redis://alice:hunter2@[::1]:1").hosts

    assert host == HostPort("::1", 1, "alice", "hunter2")
    assert str(host) == "[::1]:1"
    assert "hunter2" not in repr(host)
    assert "alice" not in repr(host)


def test_shortcuts() -> None:
    """What most backends want."""
    one, other = parse("file:"), parse("redis+sentinel://h:1,i:2/m")

    assert (one.base, one.driver, one.host, one.port) == ("file", None, None, None)
    assert (other.base, other.driver, other.host, other.port) == ("redis", "sentinel", "h", 1)


def test_url_is_a_value() -> None:
    """Equal by its text, hashable, not to be changed, and it survives pickling."""
    url = parse("redis://u:p@h/0")

    assert url == parse("redis://u:p@h/0") != parse("redis://u:q@h/0")
    assert len({url, parse("redis://u:p@h/0")}) == 1
    assert pickle.loads(pickle.dumps(url)) == url  # noqa: S301 - our own bytes
    with pytest.raises(FrozenInstanceError):
        url.path = "/1"  # type: ignore[misc]


# -- properties ----------------------------------------------------------------------------------------------------

_host_names = st.from_regex(r"[a-z][a-z0-9.\-]{0,10}", fullmatch=True)
_hosts = st.one_of(_host_names, st.ip_addresses(v=6).map(str))
_ports = st.none() | st.integers(1, 65535)
_words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)


def write(host: HostPort) -> str:
    """Write a host with its user information, as a careful user would."""
    user = "" if host.username is None else quote(host.username, safe="")
    password = "" if host.password is None else f":{quote(host.password, safe='')}"
    return f"{user}{password}@{host}"


@given(
    st.lists(st.builds(HostPort, _hosts, _ports, st.none() | _words, st.none() | _words), max_size=4),
    st.lists(_words, max_size=3),
    st.dictionaries(_words, _words, max_size=4),
)
def test_what_was_encoded_comes_back(hosts: list[HostPort], path: list[str], query: dict[str, str]) -> None:
    """Whatever the words are: percent-encoding them is enough."""
    raw_path = "".join(f"/{quote(part, safe='')}" for part in path)
    raw_query = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in query.items())

    url = parse(f"x://{','.join(map(write, hosts))}{raw_path}?{raw_query}")

    assert url.hosts == tuple(hosts)
    assert url.path == "".join(f"/{part}" for part in path)
    assert url.raw_path == raw_path
    assert dict(url.query) == query


# What people paste: all the characters that mean something in a URL, around a mark that occurs nowhere else.
_pasted = st.text(st.sampled_from("aB1:/?#[]@,&=+%;é .-\\"), max_size=8)
_raw_passwords = st.tuples(_pasted, _pasted).map("Zq7w".join)
_frames = st.sampled_from(
    [
        *("redis://{}@h:1/0", "redis://:{}@h:1/0", "redis://u:{}@h", "redis://u:{}@h1,v:{}@h2/0"),
        *("redis://h1,u:{}@h2/0?ttl=5", "redis://u:{}@[::1]:6379", "redis://u:{}@::1:6379", "redis://u:{}@h:badport"),
        *("redis://u:{}@h,,i", "redis://u:{}@[::1/0", "redis://u:{}@h?a=1&a=2", "redis://u:{}@h/0?tll=5"),
        *("redis://?{}@h:1/0", "redis:///{}@h:1/0", "redis://h/0#u:{}@h", "redis:u:{}@h", "redis:{}@h"),
        *("redis:\\\\u:{}@h", "sqlite:///u:{}@h/db", "unix://u:{}@/run/none.sock", "redlock://u:{}@h1,h2,h3"),
        *("redis+sentinel://u:{}@h1,h2/m/0", "redis+cluster://u:{}@h1,h2", "etcd://u:{}@h1,h2"),
        *("postgresql://u:{}@h/db", "nosuch://u:{}@h/db", "u:{}@h/0", "{}@h/0"),
    ]
)


def everything_shown(error: BaseException | None) -> str:
    """What a log may show of an exception: itself, and what it came from."""
    if error is None:
        return ""
    shown = f"{error}{error!r}{error.args}{vars(error)}"
    return f"{shown}{everything_shown(error.__cause__)}{everything_shown(error.__context__)}"


@settings(deadline=None)  # the first one of a scheme imports its driver
@given(_frames, _raw_passwords)
@example("redis://u:{}@h", "12/Zq7w")
@example("redis://u:{}@h", "12?Zq7w")
@example("redis://u:{}@h", "12?password=Zq7w")
@example("redis://u:{}@h", "1,Zq7w")
@example("redis://u:{}@h", "1,Zq7w,1")
@example("redis://u:{}@h", "[Zq7w")
@example("redis://{}@h:1/0", "?1=Zq7w")
@example("redis://{}@h:1/0", "/Zq7w")
@example("sqlite:///u:{}@h/db", "Zq7w")
@example("redis://u:{}@h", "a@Zq7w,b")
@example("redis+sentinel://u:{}@h/m", "a@b,Zq7w")
@example("redlock://u:{}@h1,h2,h3", "a@Zq7w,b:c")
@example("redlock://h1,u:{}@h2", "a@b,c,Zq7w")
@example("redis:{}@h", "Zq7w:")
def test_no_password_in_any_message_or_repr(frame: str, password: str) -> None:
    """Also of passwords that were pasted without encoding, wherever that makes the parser see them."""
    # The part before a colon is a user name, or the scheme: messages show those.
    assume(not (frame.startswith(("{}", "redis://{}")) and re.search("Zq7w.*:", password)))
    text = frame.format(*[password] * frame.count("{}"))
    try:
        url = parse(text)
        seen = f"{url}{url!r}{url.redacted()}"
        # What stands between an @ and a comma is a host: whoever asks for it gets it.
        seen += "" if re.search("@.*,", password) else f"{url.hosts!r}"
        with lockkit.connect(text) as client:
            seen += f"{client!r}{client.url}"
    except ConfigurationError as error:
        seen = everything_shown(error)

    assert "Zq7w" not in seen


@given(st.text(st.characters(codec=None)) | st.text(st.sampled_from("redis:/@[],?&=%1a+"), max_size=20))
def test_any_text_gives_a_url_or_a_configuration_error(text: str) -> None:
    """No other exception leaves the parser."""
    try:
        url = parse(text)
    except ConfigurationError:
        return
    assert url.scheme == url.scheme.lower()
    assert all(host.host for host in url.hosts)
