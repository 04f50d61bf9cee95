"""
The guard for data in Redis or Valkey.

Next to the guarded data, in the same Cluster slot, lockkit stores a *mark*: the newest token that was accepted, and
beside it a second one for the tokens of readers, once there are any. One script (``guard.lua``) compares the token with
the marks, writes one of them and makes the change, so no other client can come in between. Marks are compared as
decimal text, because Lua's numbers are doubles, exact only up to 2^53.

===========================  ============================================  =============================================
guarded key or scope         its mark                                      its mark of readers
===========================  ============================================  =============================================
``seat:12A``                 ``PREFIX:guard:{seat:12A}``                   ``PREFIX:guard-read:{seat:12A}``
``{seat:12A}:customer``      ``PREFIX:guard-tagged:{seat:12A}:customer``   ``PREFIX:guard-read-tagged:…``, the same
===========================  ============================================  =============================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from importlib.resources import files
from typing import Any, cast

import redis
import redis.exceptions

from lockkit import validation
from lockkit.errors import ConfigurationError, LockError
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, Runtime, drive
from lockkit.storage.redis.client import (
    DRIVER_ERRORS,
    AsyncClient,
    Key,
    SyncClient,
    Value,
    check_client,
    check_key,
    data_error,
    is_from_script,
    label_of,
    milliseconds,
    text_of,
)
from lockkit.storage.tokens import check_token, stale_token
from lockkit.units import Seconds

_GUARD = files("lockkit.storage.redis").joinpath("guard.lua").read_text("utf-8")
_SET = """
if ARGV[2] == '' then
  return redis.call('SET', KEYS[1], ARGV[1])
end
return redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])"""
_DELETE = "return redis.call('DEL', KEYS[1])"
_NOTHING = "return 1"

SCRIPTS_MAX = 256
"""How many application scripts are kept in wrapped form. More takes memory; fewer means hashing them again."""


class _Guard:
    """What both guards do, written once: the methods of `AsyncRedisGuard`, on any runtime."""

    def __init__(self, runtime: Runtime, client: Any, prefix: object, keep: Seconds | timedelta | None) -> None:  # noqa: ANN401 - four classes of redis-py's
        other = "AsyncRedisGuard" if runtime.kind == "blocking" else "RedisGuard"
        check_client(client, runtime.kind, other=f"lockkit.fencing.{other}")
        if not isinstance(prefix, str) or not prefix or "{" in prefix or "}" in prefix:
            message = (
                f"prefix must be a non-empty str without braces, which decide the Cluster slot; not "
                f"{validation.shown(prefix)}"
            )
            raise ConfigurationError(message)
        self._runtime = runtime
        self._client = client
        self._prefix = prefix
        self._keep_ms = milliseconds(keep, "keep") or ""

    async def set(
        self, key: Key, value: Value, *, token: int, scope: Key | None = None, ttl: Seconds | timedelta | None = None
    ) -> None:
        """Set a key to a value, unless the token is stale. See `RedisGuard.set`."""
        await self.run(_SET, keys=(key,), args=(value, milliseconds(ttl, "ttl") or ""), token=token, scope=scope)

    async def delete(self, key: Key, *, token: int, scope: Key | None = None) -> bool:
        """Delete a key, unless the token is stale. See `RedisGuard.delete`."""
        return bool(await self.run(_DELETE, keys=(key,), token=token, scope=scope))

    async def run(
        self,
        script: str,
        *,
        keys: Sequence[Key],
        args: Sequence[Value] = (),
        token: int,
        scope: Key | None = None,
        shared: bool = False,
    ) -> Any:  # noqa: ANN401 - what the script returns
        """Run a Lua script of your own, unless the token is stale. See `RedisGuard.run`."""
        scope = _scope(keys, scope)
        name = text_of(scope)
        check_token(token, name=name)
        given: object = script
        if not isinstance(given, str) or not given.strip() or given.startswith("#!"):
            message = f"script must be Lua code without a first line '#!lua', not {validation.shown(given)}"
            raise ConfigurationError(message, name=name)
        if isinstance(args, (str, bytes)):
            message = f"args must be a list of arguments, not {validation.shown(args)}"
            raise ConfigurationError(message, name=name)
        text, sha = _wrapped(script)
        sent = [2 + len(keys), *self._marks(scope), *keys, token, self._keep_ms, "r" if shared else "w", *args]
        try:
            try:
                return await self._runtime.io(self._client.evalsha(sha, *sent))
            except redis.exceptions.NoScriptError:
                # EVAL also loads the script into the server (in a Cluster into the right one), for the next time.
                return await self._runtime.io(self._client.eval(text, *sent))
        except redis.DataError as error:
            message = f"redis-py cannot send this to {name!r}: {error}"
            raise ConfigurationError(message, name=name) from error
        except DRIVER_ERRORS as error:
            refusal = self._refusal(error, token, name, shared=shared)
            if refusal is not None:
                raise refusal from None
            if is_from_script(error):
                raise
            raise data_error(error, self._client, scope) from error

    async def accept(self, scope: Key, *, token: int, shared: bool = False) -> None:
        """Accept a token without a change, and no older one from now on. See `RedisGuard.accept`."""
        await self.run(_NOTHING, keys=(), token=token, scope=scope, shared=shared)

    async def last(self, scope: Key) -> int | None:
        """Return the newest token that was accepted in a scope; None if there is none."""
        check_key(scope, "scope")
        try:
            found = await self._runtime.io(self._client.mget(self._marks(scope)))
        except DRIVER_ERRORS as error:
            raise data_error(error, self._client, scope) from error
        marks = [mark for mark in found if mark is not None]
        if not all(mark.isdigit() for mark in marks):
            raise self._bad_mark(text_of(scope))
        return max(map(int, marks), default=None)

    def _marks(self, scope: Key) -> list[Key]:
        return [mark_of(self._prefix, scope), mark_of(self._prefix, scope, "guard-read")]

    def _refusal(self, error: BaseException, token: int, name: str, *, shared: bool) -> LockError | None:
        """Make the error for a refusal by guard.lua; None if it did not refuse."""
        code, _, last = str(error).partition(" ")
        if code == "STALETOKEN":
            what, label = "the read" if shared else "the change", label_of(self._client)
            return stale_token(what, token, int(last.split()[0]), name=name, backend=label)
        return self._bad_mark(name) if code == "BADMARK" else None

    def _bad_mark(self, name: str) -> ConfigurationError:
        label = label_of(self._client)
        message = (
            f"the mark of {name!r} at {label} does not hold a token: another program uses that key. Use another prefix"
        )
        return ConfigurationError(message, name=name, backend=label)


class AsyncRedisGuard(_Guard):
    """
    Guards data in Redis or Valkey, with asyncio.

    The same as `RedisGuard`, and both may guard the same data; what does I/O is awaited.
    """

    def __init__(
        self, client: AsyncClient, *, prefix: str = "lockkit", keep: Seconds | timedelta | None = None
    ) -> None:
        """
        Use the application's client. No I/O.

        Args:
            client: A `redis.asyncio.Redis` or `redis.asyncio.RedisCluster`.
            prefix: See `RedisGuard`.
            keep: See `RedisGuard`.
        """
        super().__init__(AsyncioRuntime(), client, prefix, keep)


class RedisGuard:
    """
    Guards data in Redis or Valkey, blocking. Threads may share it.

    ::

        guard = lockkit.fencing.RedisGuard(redis.Redis())
        with client.lock("seat:12A") as lease:
            guard.set("seat:12A:customer", "Ada", token=lease.token)

    Every change through the guard is one atomic script and one round trip. The guard does not protect data from
    programs that write without it.

    Tokens are compared within a *scope*: one key, unless you say otherwise. If one lock protects several keys, use the
    same scope for all changes, so that a holder that was replaced can change none of them. In a Cluster all keys of a
    call, and the scope, need the same hash tag: ``{seat:12A}:customer`` in the scope ``{seat:12A}``.

    Raises:
        lockkit.StaleToken: By each change, when a newer token was accepted in this scope. Nothing was written.
        lockkit.BackendUnavailable: By each call, when Redis gave no usable answer.
    """

    def __init__(self, client: SyncClient, *, prefix: str = "lockkit", keep: Seconds | timedelta | None = None) -> None:
        """
        Use the application's client. No I/O.

        Args:
            client: A `redis.Redis` or `redis.RedisCluster`, with ``decode_responses`` on or off.
            prefix: First part of the names of the marks. Use the same one in all programs that guard the same data.
            keep: Seconds for which Redis keeps a mark after the last change; None keeps it as long as Redis keeps its
                data. **A holder that was paused for longer than this is no longer refused.** Use it when you have an
                unlimited number of scopes.
        """
        self._guard = _Guard(BlockingRuntime(), client, prefix, keep)

    def set(
        self, key: Key, value: Value, *, token: int, scope: Key | None = None, ttl: Seconds | timedelta | None = None
    ) -> None:
        """
        Set a key to a value, unless the token is stale.

        Args:
            key: What to write.
            value: What to write there.
            token: The token of the lease under which you work.
            scope: Within what tokens are compared; the key itself if None.
            ttl: Seconds after which the key expires; None: it does not expire (as with Redis' ``SET``, an earlier
                expiry is removed).
        """
        drive(self._guard.set(key, value, token=token, scope=scope, ttl=ttl))

    def delete(self, key: Key, *, token: int, scope: Key | None = None) -> bool:
        """
        Delete a key, unless the token is stale. The mark stays, so stale holders are refused afterwards, too.

        Args:
            key: What to delete.
            token: The token of the lease under which you work.
            scope: Within what tokens are compared; the key itself if None.

        Returns:
            Whether the key existed.
        """
        return drive(self._guard.delete(key, token=token, scope=scope))

    def run(
        self,
        script: str,
        *,
        keys: Sequence[Key],
        args: Sequence[Value] = (),
        token: int,
        scope: Key | None = None,
        shared: bool = False,
    ) -> Any:  # noqa: ANN401 - what the script returns
        """
        Run a Lua script of your own, unless the token is stale.

        Args:
            script: It sees ``KEYS`` and ``ARGV`` as usual. Keep its text constant and pass what varies in `args`:
                Redis keeps every script that it was ever sent.
            keys: Its keys.
            args: Its arguments.
            token: The token of the lease under which you work.
            scope: Within what tokens are compared; may be left out if there is one key.
            shared: The lease is a reader's (``lease.mode == "shared"``), and the script only reads. See `accept`.

        Returns:
            What the script returns, as redis-py converts it.

        Raises:
            redis.ResponseError: The script itself failed. What it wrote before stays, as always in Redis, and the
                token counts as accepted.
        """
        return drive(self._guard.run(script, keys=keys, args=args, token=token, scope=scope, shared=shared))

    def accept(self, scope: Key, *, token: int, shared: bool = False) -> None:
        """
        Accept a token without a change, and no older one from now on.

        Called right after the lock was acquired, it refuses earlier holders even before your first write.

        Readers hold a read/write lock together, so a reader's token shuts out older writers, not older readers.

        Args:
            scope: Within what tokens are compared.
            token: The token of the lease under which you work.
            shared: It is a reader's: ``lease.mode == "shared"``.
        """
        drive(self._guard.accept(scope, token=token, shared=shared))

    def last(self, scope: Key) -> int | None:
        """Return the newest token that was accepted in a scope; None if there is none."""
        return drive(self._guard.last(scope))


def mark_of(prefix: str, scope: Key, kind: str = "guard") -> Key:
    """
    Return the name of a scope's mark, which is in the scope's Cluster slot; `kind` names which one.

    The part between the first ``{`` and the next ``}`` decides the slot; where there is no such part, or it is empty,
    the whole key does (Redis Cluster specification, "Hash tags"). A scope without a tag becomes the tag of its mark.
    This is impossible for a scope with a lone ``}``: its mark is in another slot, and a Cluster refuses the call.
    """
    if isinstance(scope, bytes):
        # Decoded to one character for each byte, so that the rest is the same for both.
        return cast("str", mark_of(prefix, scope.decode("latin-1"), kind)).encode("latin-1")
    tag = scope.partition("{")[2].partition("}")
    if tag[0] and tag[1]:
        return f"{prefix}:{kind}-tagged:{scope}"
    return f"{prefix}:{kind}:{{{scope}}}"


def _scope(keys: object, scope: Key | None) -> Key:
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Sequence):
        message = f"keys must be a list of keys, not {validation.shown(keys)}"
        raise ConfigurationError(message)
    for key in keys:
        check_key(key, "a key")
    if scope is None:
        if len(keys) != 1:
            message = "give the scope within which tokens are compared: it can be left out only for a single key"
            raise ConfigurationError(message)
        return cast("Key", keys[0])
    check_key(scope, "scope")
    return scope


@lru_cache(maxsize=SCRIPTS_MAX)
def _wrapped(script: str) -> tuple[str, str]:
    """Wrap a script in the guard; return the text and its SHA-1."""
    # On the first line, so that the line numbers in its errors are right.
    text = f"local body = function(KEYS, ARGV) {script}\nend\n{_GUARD}"
    return text, hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - what Redis uses
