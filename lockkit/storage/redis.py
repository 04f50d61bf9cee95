"""
Guards and optimistic updates of data in Redis or Valkey, with the application's own redis-py client.

Next to the guarded data, in the same Cluster slot, lockkit stores a *mark*: the newest token that was accepted, and
beside it a second one for the tokens of readers, once there are any. One script (``redis_guard.lua``) compares the
token with the marks, writes one of them and makes the change, so no other client can come in between. Marks are
compared as decimal text, because Lua's numbers are doubles, exact only up to 2^53.

===========================  ============================================  =============================================
guarded key or scope         its mark                                      its mark of readers
===========================  ============================================  =============================================
``seat:12A``                 ``PREFIX:guard:{seat:12A}``                   ``PREFIX:guard-read:{seat:12A}``
``{seat:12A}:customer``      ``PREFIX:guard-tagged:{seat:12A}:customer``   ``PREFIX:guard-read-tagged:…``, the same
===========================  ============================================  =============================================

An update (`lockkit.optimistic`) uses one connection for the whole try, from ``WATCH`` to ``EXEC``. If it is lost, the
watch is lost with it, and the try fails.

The application configures retries, timeouts and the connection pool. Driver exceptions become lockkit's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from importlib.resources import files
from typing import Any, ClassVar, Literal, TypeAlias, cast

import redis
import redis.asyncio
import redis.asyncio.client
import redis.asyncio.cluster
import redis.client
import redis.cluster
import redis.exceptions

from lockkit import validation
from lockkit.backends.redis.errors import server_said, translate
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, Unsupported
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, Runtime, drive
from lockkit.storage.retry import DELETE, Conflict, Delete, OptimisticUpdate, as_bytes, text_of, unknown_outcome
from lockkit.storage.tokens import check_token, stale_token
from lockkit.units import Seconds

SyncClient: TypeAlias = "redis.Redis | redis.RedisCluster"
AsyncClient: TypeAlias = "redis.asyncio.Redis | redis.asyncio.RedisCluster"
Key: TypeAlias = str | bytes
Value: TypeAlias = str | bytes | int | float

# RedisClusterException is not a RedisError.
DRIVER_ERRORS = (redis.RedisError, redis.exceptions.RedisClusterException, OSError)
_LOST = (redis.ConnectionError, redis.TimeoutError, OSError)

# Errors about the server itself, also inside the message of a script's error, for which redis-py has no class.
_SERVER_CODES = re.compile(
    r"^BUSY\b|\b(ASK|CLUSTERDOWN|CROSSSLOT|MISCONF|MOVED|NOPERM|NOREPLICAS|OOM|READONLY|TRYAGAIN|UNKILLABLE)\b"
)
_BLOCKING = (redis.Redis, redis.RedisCluster)
_ASYNCIO = (redis.asyncio.Redis, redis.asyncio.RedisCluster)
_CLUSTERS = (redis.RedisCluster, redis.asyncio.RedisCluster)
# They derive from the clients, but run commands later, or only some of them.
_PIPELINES = (
    redis.client.Pipeline,
    redis.cluster.ClusterPipeline,
    redis.asyncio.client.Pipeline,
    redis.asyncio.cluster.ClusterPipeline,
)


def check_client(client: object, runtime: Runtime, *, other: str) -> None:
    """Check that an object is a redis-py client for a runtime; `other` is what takes those for the other one."""
    blocking = runtime.kind == "blocking"
    if isinstance(client, _PIPELINES):
        message = "client must be the client itself, not a pipeline of it: lockkit needs the answer at once"
    elif isinstance(client, _BLOCKING if blocking else _ASYNCIO):
        return
    elif isinstance(client, (*_BLOCKING, *_ASYNCIO)):
        kind = "asyncio" if blocking else "blocking"
        message = f"{type(client).__module__}.{type(client).__name__} is {kind}: use {other}"
    else:
        form = "redis." if blocking else "redis.asyncio."
        message = f"client must be a {form}Redis or {form}RedisCluster, not {type(client).__name__}"
    raise ConfigurationError(message)


def milliseconds(seconds: object, what: str) -> int | None:
    """Convert a time span to whole milliseconds, as Redis wants it: at least 1; None for None."""
    if seconds is None:
        return None
    try:
        number = validation.parse_ttl(None if isinstance(seconds, str) else seconds)
    except ValueError as error:
        raise ConfigurationError(f"{what} {error}, not {validation.shown(seconds)}") from None
    return max(1, int(-(number * 1000) // -1))


def label_of(client: Any) -> str:  # noqa: ANN401 - four classes of redis-py's
    """Name the server for messages, without a password."""
    if isinstance(client, _CLUSTERS):
        return "the Cluster"
    pool = client.connection_pool
    if hasattr(pool, "service_name"):
        return f"the master {pool.service_name!r}"
    arguments = pool.connection_kwargs
    if "path" in arguments:
        return str(arguments["path"])
    return f"{arguments.get('host', 'localhost')}:{arguments.get('port', 6379)}"


def data_error(error: BaseException, client: object, key: Key) -> LockError:
    """Make lockkit's error from one of `DRIVER_ERRORS`, for a command on the application's data."""
    label, name = label_of(client), text_of(key)
    if isinstance(error, redis.exceptions.RedisClusterException):
        message = (
            f"{name!r} cannot be used at {label}: {error}. Give all keys of a call the same hash tag, {{like this}}"
        )
        return ConfigurationError(message, name=name)
    if isinstance(error, redis.ResponseError):
        text = str(error)
        if "WRONGTYPE" in text:
            return ConfigurationError(f"{label} holds a value at {name!r} that is not a string: {text}", name=name)
        if isinstance(error, redis.exceptions.AskError) or text.startswith(("MOVED", "CROSSSLOT")):
            message = f"{label} is a node of a Cluster: use a RedisCluster client, and keys of one slot ({text})"
            return ConfigurationError(message, name=name)
        error = server_said(error)
    made = translate(error, label)
    made.name = name
    return made


_GUARD = files("lockkit.storage").joinpath("redis_guard.lua").read_text("utf-8")
_SET = """
if ARGV[2] == '' then
  return redis.call('SET', KEYS[1], ARGV[1])
end
return redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])"""
_DELETE = "return redis.call('DEL', KEYS[1])"
_NOTHING = "return 1"

SCRIPTS_MAX = 256
"""How many application scripts are kept in wrapped form. More takes memory; fewer means hashing them again."""


class AsyncRedisGuard:
    """
    Guards data in Redis or Valkey, with asyncio.

    The same as `RedisGuard`, and both may guard the same data; what does I/O is awaited.
    """

    _runtime_class: ClassVar[type[AsyncioRuntime | BlockingRuntime]] = AsyncioRuntime

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
        self._runtime = self._runtime_class()
        other = "AsyncRedisGuard" if self._runtime.kind == "blocking" else "RedisGuard"
        check_client(client, self._runtime, other=f"lockkit.fencing.{other}")
        given: object = prefix
        if not isinstance(given, str) or not given or "{" in given or "}" in given:
            message = (
                f"prefix must be a non-empty str without braces, which decide the Cluster slot; not "
                f"{validation.shown(prefix)}"
            )
            raise ConfigurationError(message)
        self._client: Any = client
        self._prefix = prefix
        self._keep_ms = milliseconds(keep, "keep") or ""

    async def set(
        self, key: Key, value: Value, *, token: int, scope: Key | None = None, ttl: Seconds | timedelta | None = None
    ) -> None:
        """Set a key to a value, unless the token is stale. See `RedisGuard.set`."""
        sent = value, milliseconds(ttl, "ttl") or ""
        await self._run(_SET, (key,), sent, token=token, scope=scope, ask=self._ask)

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
        return await self._run(script, keys, args, token=token, scope=scope, shared=shared, ask=self._ask_once)

    async def _run(
        self,
        script: str,
        keys: Sequence[Key],
        args: Sequence[Value] = (),
        *,
        token: int,
        scope: Key | None,
        shared: bool = False,
        ask: Callable[..., Awaitable[Any]],
    ) -> Any:  # noqa: ANN401 - what the script returns
        scope = _scope(keys, scope)
        name = text_of(scope)
        check_token(token, name=name)
        given: object = script
        if not isinstance(given, str) or not given.strip() or given.startswith("#!"):
            message = f"script must be Lua code without a first line '#!lua', not {validation.shown(given)}"
            raise ConfigurationError(message, name=name)
        if isinstance(args, (str, bytes)):
            raise ConfigurationError(f"args must be a list of arguments, not {validation.shown(args)}", name=name)
        text, sha = _wrapped(script)
        sent = [2 + len(keys), *self._marks(scope), *keys, token, self._keep_ms, "r" if shared else "w", *args]
        try:
            try:
                return await ask(name, "EVALSHA", sha, *sent)
            except redis.exceptions.NoScriptError:
                # EVAL also loads the script into the server (in a Cluster into the right one), for the next time.
                return await ask(name, "EVAL", text, *sent)
        except LockError:  # some are an OSError
            raise
        except redis.DataError as error:
            raise ConfigurationError(f"redis-py cannot send this to {name!r}: {error}", name=name) from error
        except DRIVER_ERRORS as error:
            code, _, last = str(error).partition(" ")
            if code == "STALETOKEN":
                what, label = "the read" if shared else "the change", label_of(self._client)
                raise stale_token(what, token, int(last.split()[0]), name=name, backend=label) from None
            if code == "BADMARK":
                raise self._bad_mark(name) from None
            if type(error) is redis.ResponseError and not _SERVER_CODES.search(str(error)):
                raise  # from the application's script, and not from the server or for missing rights
            raise data_error(error, self._client, scope) from error

    async def accept(self, scope: Key, *, token: int, shared: bool = False) -> None:
        """Accept a token without a change, and no older one from now on. See `RedisGuard.accept`."""
        await self._run(_NOTHING, (), token=token, scope=scope, shared=shared, ask=self._ask)

    async def _ask(self, name: str, *command: Any) -> Any:  # noqa: ANN401 - redis-py's
        """Send a command, which the client may send again after a lost connection."""
        del name
        return await self._runtime.io(self._client.execute_command(*command))

    async def _ask_once(self, name: str, *command: Any) -> Any:  # noqa: ANN401 - redis-py's
        """Send a command that must not run twice, as the client would have it after a lost answer."""
        try:
            return await self._send_once(name, *command)
        except redis.exceptions.MovedError:  # the node has not run it
            await find_slots_again(self._client, self._runtime)
            return await self._send_once(name, *command)
        except (redis.exceptions.AskError, redis.exceptions.TryAgainError):  # nor here; the client follows the slot
            return await self._ask(name, *command)
        except (BackendUnavailable, *_LOST):
            with suppress(*DRIVER_ERRORS):  # the next call may find another node
                await find_slots_again(self._client, self._runtime)
            raise

    async def _send_once(self, name: str, *command: Any) -> Any:  # noqa: ANN401 - redis-py's
        client, io, mark = self._client, self._runtime.io, command[3]
        if isinstance(client, redis.asyncio.RedisCluster):
            node: Any = (await client.initialize()).get_node_from_key(mark)
            try:
                return await node.execute_command(*command)
            except _LOST as error:
                if isinstance(error.__context__, ConnectionRefusedError):
                    raise  # from connecting
                raise unknown_outcome(name, label_of(client), error) from error
        pipe = pipeline_for(client, mark)
        pipe.watching = True  # what a pipeline that watches has sent, redis-py does not send again
        try:
            return await io(pipe.execute_command(*command))
        except (redis.WatchError, *_LOST) as error:
            if pipe.connection is None and not isinstance(error, redis.WatchError):
                raise  # from connecting
            raise unknown_outcome(name, label_of(client), error.__context__ or error) from error
        finally:
            pipe.watching = False
            await io(pipe.reset())

    async def last(self, scope: Key) -> int | None:
        """Return the newest token that was accepted in a scope; None if there is none."""
        as_bytes(scope, "scope")
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

    def _bad_mark(self, name: str) -> ConfigurationError:
        label = label_of(self._client)
        message = (
            f"the mark of {name!r} at {label} does not hold a token: another program uses that key. Use another prefix"
        )
        return ConfigurationError(message, name=name, backend=label)


class _Blocking(AsyncRedisGuard):
    """The same on a client that blocks."""

    _runtime_class = BlockingRuntime


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
        lockkit.BackendUnavailable: By each call, when Redis gave no usable answer. If the connection was lost during
            `run` or `delete`, the change may have been made: lockkit does not send it again. `set` may be sent again.
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
        self._guard = _Blocking(cast("Any", client), prefix=prefix, keep=keep)

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
        raise ConfigurationError(f"keys must be a list of keys, not {validation.shown(keys)}")
    for key in keys:
        as_bytes(key, "a key")
    if scope is None:
        if len(keys) != 1:
            message = "give the scope within which tokens are compared: it can be left out only for a single key"
            raise ConfigurationError(message)
        return cast("Key", keys[0])
    as_bytes(scope, "scope")
    return scope


@lru_cache(maxsize=SCRIPTS_MAX)
def _wrapped(script: str) -> tuple[str, str]:
    """Wrap a script in the guard; return the text and its SHA-1."""
    # On the first line, so that the line numbers in its errors are right.
    text = f"local body = function(KEYS, ARGV) {script}\nend\n{_GUARD}"
    return text, hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - what Redis uses


def pipeline_for(client: Any, key: Key) -> Any:  # noqa: ANN401 - classes of redis-py's
    """Make a pipeline of the server that has the key; not for an asyncio Cluster."""
    if isinstance(client, redis.RedisCluster):
        node: Any = client.get_node_from_key(key)  # type: ignore[no-untyped-call]
        client = client.get_redis_connection(node)
    return client.pipeline(transaction=True)


async def find_slots_again(client: Any, runtime: Runtime) -> None:  # noqa: ANN401 - as above
    """Have a client for a Cluster ask which node has which slot."""
    if isinstance(client, _CLUSTERS):
        await runtime.io(client.nodes_manager.initialize())


class StringUpdate(OptimisticUpdate):
    """One call of `lockkit.optimistic.with_retry` or `lockkit.optimistic.with_retry_async`."""

    values = (str, bytes, int, float)
    values_named = "a str, bytes, int or float"

    def __init__(self, runtime: Runtime, client: object, key: Key, fn: object, ttl: Seconds | timedelta | None) -> None:
        """Check the arguments. No I/O."""
        other = "with_retry_async" if runtime.kind == "blocking" else "with_retry"
        check_client(client, runtime, other=f"lockkit.optimistic.{other}")
        as_bytes(key, "key")
        super().__init__(runtime, fn, text_of(key), label_of(client))
        self._client = client
        self._key = key
        self._ttl_ms = milliseconds(ttl, "ttl")

    async def _attempt(self) -> Any:  # noqa: ANN401 - what `fn` returns
        pipe = self._pipeline()
        try:
            new = await self.new_value(await self._read(pipe))
            if new is not None:
                await self._write(pipe, new)
        finally:
            # Returns the connection to the pool, watching nothing.
            try:
                await self.runtime.io(pipe.reset())
            except DRIVER_ERRORS:
                # UNWATCH was not answered. The caller needs the error of before, and a connection that watches nothing.
                if pipe.connection is not None:  # redis-py 8 gives it back, closed
                    await self.runtime.io(pipe.connection.disconnect())
                pipe.watching = False
                await self.runtime.io(pipe.reset())
        return new

    def _pipeline(self) -> Any:  # noqa: ANN401 - two classes of redis-py's
        if isinstance(self._client, redis.asyncio.RedisCluster):
            message = (
                "redis.asyncio.RedisCluster sends a transaction again without its WATCH after a lost connection, so it "
                "could overwrite changes of others: use with_retry and a redis.RedisCluster, or take a lock"
            )
            raise Unsupported(message, name=self.name)
        try:
            # For the same reason this uses a transaction of the node that has the key, not one of the Cluster's own.
            return pipeline_for(self._client, self._key)
        except DRIVER_ERRORS as error:
            raise data_error(error, self._client, self._key) from error

    async def _read(self, pipe: Any) -> Any:  # noqa: ANN401 - see above, and the key's value
        try:
            await self.runtime.io(pipe.watch(self._key))
            return await self.runtime.io(pipe.get(self._key))
        except redis.WatchError as error:
            raise Conflict from error  # the connection was lost, and the WATCH with it
        except DRIVER_ERRORS as error:
            await self._find_slots_again(error)
            raise data_error(error, self._client, self._key) from error

    async def _write(self, pipe: Any, new: Value | Literal[Delete.DELETE]) -> None:  # noqa: ANN401 - see above
        pipe.multi()
        if new is DELETE:
            pipe.delete(self._key)
        elif self._ttl_ms is None:
            pipe.set(self._key, new, keepttl=True)
        else:
            pipe.set(self._key, new, px=self._ttl_ms)
        try:
            await self.runtime.io(pipe.execute())
        except redis.WatchError as error:
            # redis-py raises this for a lost connection, too, and advises to try again. But if the answer to EXEC was
            # lost, the change may have been made, and a second try would count one order twice: see the test
            # test_lost_answer_is_not_tried_again.
            if isinstance(error.__context__, _LOST):
                raise unknown_outcome(self.name, self.label, error.__context__) from error
            raise Conflict from error
        except _LOST as error:
            raise unknown_outcome(self.name, self.label, error) from error
        except DRIVER_ERRORS as error:
            # The server refused: EXEC did nothing.
            await self._find_slots_again(error)
            raise data_error(error, self._client, self._key) from error

    async def _find_slots_again(self, error: BaseException) -> None:
        """In a Cluster, ask which node has which slot when a node is gone or redirects the client."""
        if not isinstance(self._client, redis.RedisCluster):
            return
        moved = isinstance(error, (redis.exceptions.AskError, redis.exceptions.TryAgainError))
        if moved or isinstance(error, _LOST):
            try:
                await find_slots_again(self._client, self.runtime)
            except DRIVER_ERRORS as unreachable:
                raise data_error(unreachable, self._client, self._key) from unreachable
        if moved:
            raise Conflict from error
