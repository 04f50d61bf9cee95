"""What the baselines on Redis say: their scripts, and connections by lockkit's URLs."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from lockkit.url import HostPort, Url, parse
from lockkit_tools.servers.resp import RespConnection

RELEASE = b"""
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

RELEASE_AND_SIGNAL = b"""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('DEL', KEYS[2])
redis.call('RPUSH', KEYS[2], '1')
redis.call('PEXPIRE', KEYS[2], 1000)
return 1
"""

FENCED_SET = b"""
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
local time = redis.call('TIME')
return math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), time[1] * 1000000 + time[2])
"""

FENCE = b"""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', 86400000)
return 1
"""

READ = b"""
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
"""

WRITE = b"""
local time = redis.call('TIME')
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', time[1] * 1000 + math.floor(time[2] / 1000))
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
return 1
"""

PERMIT = b"""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[3]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""

_SECONDS_MAX = 60.0
"""An answer that takes longer fails the subject; a ``BLPOP`` of one lease time must fit."""


def node_urls(url: str) -> list[str]:
    """Give a ``redis://`` URL for each node of a ``redlock://`` URL; any other URL as it is."""
    parsed = parse(url)
    if parsed.base != "redlock":
        return [url]
    return [f"redis://{_userinfo(host)}{host}{parsed.raw_path}" for host in parsed.hosts]


def connect_to(url: str) -> RespConnection:
    """Connect to the node of a ``redis://``, ``valkey://`` or ``unix://`` URL."""
    parsed: Url = parse(url)
    if parsed.base == "unix":
        connection = RespConnection(Path(parsed.path), timeout=_SECONDS_MAX)
        database, user, password = dict(parsed.query).get("db", "0"), parsed.username, parsed.password
    else:
        host = parsed.hosts[0]
        connection = RespConnection((host.host, host.port or 6379), timeout=_SECONDS_MAX)
        database, user, password = parsed.path.strip("/") or "0", host.username, host.password
    try:
        if password is not None:
            connection.call("AUTH", user or "default", password)
        if database != "0":
            connection.call("SELECT", database)
    except BaseException:
        connection.close()
        raise
    return connection


def _userinfo(host: HostPort) -> str:
    if host.password is None:
        return ""
    return f"{quote(host.username or '', safe='')}:{quote(host.password, safe='')}@"
