"""
The guard for data in Redis or Valkey.

Beside what it guards, in the same Cluster slot, lies a *mark*: the newest token that was accepted. One script
(``guard.lua``) compares the token with the mark, writes the mark and runs the change, so nobody comes
between them. The mark is text, and numbers are compared as text: Lua's own are doubles, exact up to 2^53 only.

===========================  =================================================================
what is guarded              its mark
===========================  =================================================================
``seat:12A``                 ``PREFIX:guard:{seat:12A}``
``{seat:12A}:customer``      ``PREFIX:guard-tagged:{seat:12A}:customer``
===========================  =================================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import redis
import redis.exceptions

from lockkit import validation
from lockkit.errors import ConfigurationError, LockError
from lockkit.fencing import check_token, stale_token
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, drive
from lockkit.storage.redis.client import (
    DRIVER_ERRORS,
    AsyncClient,
    Key,
    Seconds,
    SyncClient,
    check_client,
    check_key,
    data_error,
    is_from_script,
    label_of,
    milliseconds,
    text_of,
)

if TYPE_CHECKING:
    from lockkit.runtime import Runtime

__all__ = ["AsyncRedisGuard", "RedisGuard"]

Value: TypeAlias = str | bytes | int | float

_GUARD = files("lockkit.storage.redis").joinpath("guard.lua").read_text()
_SET = """
if ARGV[2] == '' then
  return redis.call('SET', KEYS[1], ARGV[1])
end
return redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])"""
_DELETE = "return redis.call('DEL', KEYS[1])"
_NOTHING = "return 1"

SCRIPTS_MAX = 256
"""Application scripts whose text is kept wrapped. More takes memory, fewer hashes again."""


class RedisGuard:
    """
    Guards data in Redis or Valkey, blocking. Threads may share it.

    ::

        guard = lockkit.fencing.RedisGuard(redis.Redis())
        with client.lock("seat:12A") as lease:
            guard.set("seat:12A:customer", "Ada", token=lease.token)

    Every change through the guard is one atomic script and one round trip. What is written past the guard is not
    guarded.

    Tokens are compared within a *scope*: one key, unless you say otherwise. If one lock protects several keys, give
    all changes the same scope, so that a holder that was replaced is kept from each of them. In a Cluster all keys of
    a call, and the scope, need the same hash tag: ``{seat:12A}:customer`` in the scope ``{seat:12A}``.

    Raises:
        lockkit.StaleToken: By each change, when a newer token was accepted in this scope. Nothing was written.
        lockkit.BackendUnavailable: By each call, when Redis gave no usable answer.
    """

    def __init__(self, client: SyncClient, *, prefix: str = "lockkit", keep: Seconds | None = None) -> None:
        """
        Use the application's client. No I/O.

        Args:
            client: A `redis.Redis` or `redis.RedisCluster`, with ``decode_responses`` on or off.
            prefix: First part of the names of the marks. All who guard the same data have the same.
            keep: Seconds for which a mark is kept after the last change; None keeps it as long as Redis keeps its
                data. **A holder that was paused for longer than this is not refused any more.** For scopes that come
                and go without end.
        """
        check_client(client, "blocking", other="lockkit.fencing.AsyncRedisGuard")
        self._core = _Core(BlockingRuntime(), client, prefix, keep)

    def set(self, key: Key, value: Value, *, token: int, scope: Key | None = None, ttl: Seconds | None = None) -> None:
        """
        Set a key to a value, unless the token is stale.

        Args:
            key: What to write.
            value: What to write there.
            token: Of the lease under which you work.
            scope: Within what tokens are compared; the key itself if None.
            ttl: Seconds after which the key goes away; None: it stays (as with Redis' ``SET``, an expiry that it had
                is removed).
        """
        drive(self._core.set(key, value, token, scope, ttl))

    def delete(self, key: Key, *, token: int, scope: Key | None = None) -> bool:
        """
        Delete a key, unless the token is stale. The mark stays: the stale are refused afterwards, too.

        Args:
            key: What to delete.
            token: Of the lease under which you work.
            scope: Within what tokens are compared; the key itself if None.

        Returns:
            Whether it was there.
        """
        return drive(self._core.delete(key, token, scope))

    def run(
        self,
        script: str,
        *,
        keys: Sequence[Key],
        args: Sequence[Value] = (),
        token: int,
        scope: Key | None = None,
    ) -> Any:  # noqa: ANN401 - what the script returns
        """
        Run a Lua script of your own, unless the token is stale.

        Args:
            script: It sees ``KEYS`` and ``ARGV`` as usual. Keep its text constant and put what varies into `args`:
                Redis keeps every text that it was ever sent.
            keys: Its keys.
            args: Its arguments.
            token: Of the lease under which you work.
            scope: Within what tokens are compared; may be left out if there is one key.

        Returns:
            What the script returns, as redis-py shows it.

        Raises:
            redis.ResponseError: What the script itself raised. What it wrote before stays, as always in Redis, and the
                token counts as accepted.
        """
        return drive(self._core.run(script, keys, args, token, scope))

    def accept(self, scope: Key, *, token: int) -> None:
        """
        Accept a token without a change: from now on no older one is.

        Right after the lock was acquired, it shuts out earlier holders even before the first write.

        Args:
            scope: Within what tokens are compared.
            token: Of the lease under which you work.
        """
        drive(self._core.run(_NOTHING, (), (), token, scope))

    def last(self, scope: Key) -> int | None:
        """Give the newest token that was accepted in a scope; None if there is none."""
        return drive(self._core.last(scope))


class AsyncRedisGuard:
    """
    Guards data in Redis or Valkey, with asyncio.

    The same as `RedisGuard`, and both may guard the same data; what does I/O is awaited.
    """

    def __init__(self, client: AsyncClient, *, prefix: str = "lockkit", keep: Seconds | None = None) -> None:
        """
        Use the application's client. No I/O.

        Args:
            client: A `redis.asyncio.Redis` or `redis.asyncio.RedisCluster`.
            prefix: See `RedisGuard`.
            keep: See `RedisGuard`.
        """
        check_client(client, "asyncio", other="lockkit.fencing.RedisGuard")
        self._core = _Core(AsyncioRuntime(), client, prefix, keep)

    async def set(
        self, key: Key, value: Value, *, token: int, scope: Key | None = None, ttl: Seconds | None = None
    ) -> None:
        """Set a key to a value, unless the token is stale. See `RedisGuard.set`."""
        await self._core.set(key, value, token, scope, ttl)

    async def delete(self, key: Key, *, token: int, scope: Key | None = None) -> bool:
        """Delete a key, unless the token is stale. See `RedisGuard.delete`."""
        return await self._core.delete(key, token, scope)

    async def run(
        self,
        script: str,
        *,
        keys: Sequence[Key],
        args: Sequence[Value] = (),
        token: int,
        scope: Key | None = None,
    ) -> Any:  # noqa: ANN401 - what the script returns
        """Run a Lua script of your own, unless the token is stale. See `RedisGuard.run`."""
        return await self._core.run(script, keys, args, token, scope)

    async def accept(self, scope: Key, *, token: int) -> None:
        """Accept a token without a change: from now on no older one is. See `RedisGuard.accept`."""
        await self._core.run(_NOTHING, (), (), token, scope)

    async def last(self, scope: Key) -> int | None:
        """Give the newest token that was accepted in a scope; None if there is none."""
        return await self._core.last(scope)


class _Core:
    """What both faces do, written once."""

    def __init__(self, runtime: Runtime, client: Any, prefix: object, keep: Seconds | None) -> None:  # noqa: ANN401 - four classes of redis-py's
        if not isinstance(prefix, str) or not prefix or "{" in prefix or "}" in prefix:
            message = f"prefix={validation.shown(prefix)} must be a text without braces: they decide the Cluster slot"
            raise ConfigurationError(message)
        self._runtime = runtime
        self._client = client
        self._prefix = prefix
        self._keep = milliseconds(keep, "keep") or ""

    async def set(self, key: Key, value: Value, token: int, scope: Key | None, ttl: Seconds | None) -> None:
        await self.run(_SET, (key,), (value, milliseconds(ttl, "ttl") or ""), token, scope)

    async def delete(self, key: Key, token: int, scope: Key | None) -> bool:
        return bool(await self.run(_DELETE, (key,), (), token, scope))

    async def run(
        self, script: object, keys: Sequence[Key], args: Sequence[Value], token: int, scope: Key | None
    ) -> Any:  # noqa: ANN401 - what the script returns
        scope = _scope(keys, scope)
        name = text_of(scope)
        check_token(token, name=name)
        if not isinstance(script, str) or not script.strip() or script.startswith("#!"):
            message = f"script must be Lua text without a first line '#!lua', not {validation.shown(script)}"
            raise ConfigurationError(message, name=name)
        text, sha = _wrapped(script)
        sent = [1 + len(keys), mark_of(self._prefix, scope), *keys, token, self._keep, *args]
        try:
            try:
                return await self._runtime.io(self._client.evalsha(sha, *sent))
            except redis.exceptions.NoScriptError:
                # The text teaches it to the server (to the right one, in a Cluster), for the next time.
                return await self._runtime.io(self._client.eval(text, *sent))
        except redis.DataError as error:
            message = f"redis-py cannot send this to {name!r}: {error}"
            raise ConfigurationError(message, name=name) from error
        except DRIVER_ERRORS as error:
            refusal = self._refusal(error, token, name)
            if refusal is not None:
                raise refusal from None
            if is_from_script(error):
                raise
            raise data_error(error, self._client, scope) from error

    def _refusal(self, error: BaseException, token: int, name: str) -> LockError | None:
        """Read what guard.lua said."""
        code, _, last = str(error).partition(" ")
        label = label_of(self._client)
        if code == "STALETOKEN":
            return stale_token("the change", token, int(last.split()[0]), name=name, backend=label)
        if code == "BADMARK":
            message = f"{label} has no token in the mark of {name!r}: somebody else uses that key. Take another prefix"
            return ConfigurationError(message, name=name, backend=label)
        return None

    async def last(self, scope: Key) -> int | None:
        check_key(scope, "scope")
        try:
            found = await self._runtime.io(self._client.get(mark_of(self._prefix, scope)))
        except DRIVER_ERRORS as error:
            raise data_error(error, self._client, scope) from error
        return None if found is None else int(found)


def mark_of(prefix: str, scope: Key) -> Key:
    """
    Name the mark of a scope, in its Cluster slot.

    What is between the first ``{`` and the next ``}`` decides the slot, or the whole key where there is no such part,
    or it is empty (Redis Cluster specification, "Hash tags"). A scope without tag becomes the tag of its mark. One with
    a lone ``}`` cannot: its mark lies in another slot, and a Cluster refuses the call.
    """
    if isinstance(scope, bytes):
        # As text with one character for each byte: the rest is the same for both.
        return cast("str", mark_of(prefix, scope.decode("latin-1"))).encode("latin-1")
    tag = scope.partition("{")[2].partition("}")
    if tag[0] and tag[1]:
        return f"{prefix}:guard-tagged:{scope}"
    return f"{prefix}:guard:{{{scope}}}"


def _scope(keys: object, scope: Key | None) -> Key:
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Sequence):
        message = f"keys must be a list of keys, not {validation.shown(keys)}"
        raise ConfigurationError(message)
    for key in keys:
        check_key(key, "a key")
    if scope is None:
        if len(keys) != 1:
            message = "give the scope within which tokens are compared: only for one key it can be left out"
            raise ConfigurationError(message)
        return cast("Key", keys[0])
    check_key(scope, "scope")
    return scope


@lru_cache(maxsize=SCRIPTS_MAX)
def _wrapped(script: str) -> tuple[str, str]:
    """Put a script under the guard; give the text and its SHA-1."""
    # On the first line, so that the line numbers of its errors are right.
    text = f"local body = function(KEYS, ARGV) {script}\nend\n{_GUARD}"
    return text, hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - what Redis uses
