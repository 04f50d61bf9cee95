"""What every guard that remembers tokens promises: in this process, in Redis and in SQL, through both APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import lockkit
from lockkit.fencing import TOKEN_MAX, AsyncSqlGuard, SqlGuard, TokenGuard
from tests.storage.redis.support import Face
from tests.storage.sql.support import DRIVERS, Base

LARGE = 2**53
"""Around here Lua's numbers no longer tell neighbours apart."""


@dataclass
class Guard:
    """The guard of one scope, in any place: what can be asked of it."""

    accept: Callable[..., None]
    last: Callable[[], int | None]
    reset: Callable[[], object]


def in_process() -> Guard:
    """In this process."""
    guards = [TokenGuard("prices")]

    def reset() -> None:
        guards[0] = TokenGuard("prices")

    def accept(token: Any, **given: bool) -> None:  # noqa: ANN401 - also nonsense
        guards[0].accept(token, **given)

    return Guard(accept, lambda: guards[0].last, reset)


def asked(ask: Callable[[Callable[[Any], Any]], Any], reset: Callable[[], object]) -> Guard:
    """In a store: `ask` gives a function a guard of one API or the other."""
    return Guard(
        lambda token, **given: ask(lambda guard: guard.accept("prices", token=token, **given)),
        lambda: ask(lambda guard: guard.last("prices")),
        reset,
    )


def in_sql(face: str, base: Base, stack: ExitStack) -> Guard:
    """In a database, over one engine."""
    engine = stack.enter_context(base.engine())
    runner = stack.enter_context(asyncio.Runner())
    aio = create_async_engine(f"{DRIVERS[base.kind][1]}://{base.place}")
    stack.callback(lambda: runner.run(aio.dispose()))

    async def ask_async(what: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - what is asked
        async with AsyncSession(aio) as session, session.begin():
            return await what(AsyncSqlGuard(session))

    def ask(what: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - see above
        if face == "asyncio":
            return runner.run(ask_async(what))
        with Session(engine) as session, session.begin():
            return what(SqlGuard(session))

    def reset() -> None:
        with engine.begin() as connection:
            if sa.inspect(connection).has_table("lockkit_fences"):
                connection.execute(sa.text("DELETE FROM lockkit_fences"))

    return asked(ask, reset)


STORES = [f"{kind}-{face}" for kind in ("redis", "postgresql", "mariadb", "sqlite") for face in ("sync", "asyncio")]


@pytest.fixture(params=["process", *STORES])
def guard(request: pytest.FixtureRequest, bases: dict[str, Base]) -> Iterator[Guard]:
    """Each guard in turn, which has seen no token."""
    kind, _, face = request.param.partition("-")
    with ExitStack() as stack:
        if kind == "process":
            made = in_process()
        elif kind == "redis":
            data = request.getfixturevalue("data")
            made = asked(Face(face, request.getfixturevalue("server").port).guard, data.flushall)
        else:
            made = in_sql(face, bases[kind], stack)
        made.reset()
        yield made


def test_newest_token_decides(guard: Guard) -> None:
    """It may come again; an older one is refused, by name, and changes nothing."""
    assert guard.last() is None
    for token in (41, 41, 42):
        guard.accept(token)

    with pytest.raises(lockkit.StaleToken, match=r"to 'prices'.* token 42 .* yours, 41") as refusal:
        guard.accept(41)

    assert refusal.value.name == "prices"
    assert guard.last() == 42


@pytest.mark.parametrize("token", [0, -1, 1.0, True, "7", None, TOKEN_MAX + 1])
def test_what_is_no_token_is_refused(guard: Guard, token: Any) -> None:  # noqa: ANN401 - also nonsense
    """Before anything is sent."""
    with pytest.raises(lockkit.ConfigurationError, match=r"give the token of your lease, lease\.token"):
        guard.accept(token)


def test_readers_do_not_shut_out_one_another(guard: Guard) -> None:
    """Two marks: reader 7 and reader 6 hold the lock together; writer 5 came before them, writer 8 comes after."""
    guard.accept(5)
    guard.accept(7, shared=True)
    guard.accept(6, shared=True)
    assert guard.last() == 7
    with pytest.raises(lockkit.StaleToken, match=r"the (change|write) to 'prices'.* token 7 .* yours, 5"):
        guard.accept(5)
    guard.accept(8)
    with pytest.raises(lockkit.StaleToken, match=r"the read to 'prices'.* token 8 .* yours, 7"):
        guard.accept(7, shared=True)
    guard.accept(8, shared=True)
    with pytest.raises(lockkit.StaleToken):  # downgraded: it reads only
        guard.accept(8)
    assert guard.last() == 8


def test_marks_follow_the_lock(guard: Guard) -> None:
    """The tokens of real leases: readers together, then a writer, whose lease becomes a reader's."""
    with lockkit.connect("memory://guards") as client, lockkit.connect("memory://guards") as other:
        first = client.rwlock("x").read().acquire(60)
        second = other.rwlock("x").read().acquire(60)
        for lease in (second, first):
            guard.accept(lease.token, shared=lease.mode == "shared")
            lease.release()
        with client.rwlock("x", timeout=60).write() as lease:
            guard.accept(lease.token)
            lease.downgrade()
            guard.accept(lease.token, shared=lease.mode == "shared")
            with pytest.raises(lockkit.StaleToken):
                guard.accept(lease.token)
        with pytest.raises(lockkit.StaleToken):
            guard.accept(second.token, shared=True)


def passing(history: list[tuple[int, bool]]) -> list[bool]:
    """Say which tokens pass: a write from the newest write on and above the newest read, a read from that write on."""
    write_mark = read_mark = 0
    passed = []
    for token, shared in history:
        passes = token >= write_mark and (shared or token > read_mark)
        if passes and shared:
            read_mark = max(read_mark, token)
        elif passes:
            write_mark = token
        passed.append(passes)
    return passed


TOKENS = st.sampled_from([1, 2, 9, 10, 11, LARGE - 1, LARGE, LARGE + 1, LARGE + 2, TOKEN_MAX])


def test_only_what_a_newer_holder_excludes_is_refused(guard: Guard) -> None:
    """
    Whatever the order in which tokens arrive.

    They are compared exactly: neither as text of different lengths nor as doubles, which take 2^53 and 2^53 + 1 for one
    number.
    """

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @example([(9, False), (10, False), (9, False)])
    @example([(LARGE, False), (LARGE + 1, False), (LARGE, False)])
    @example([(TOKEN_MAX - 1, False), (TOKEN_MAX, False), (TOKEN_MAX - 1, False)])
    @example([(LARGE, True), (LARGE + 1, False)])
    @example([(LARGE + 1, False), (LARGE, True)])
    @given(st.lists(st.tuples(TOKENS, st.booleans()), max_size=12))
    def check(history: list[tuple[int, bool]]) -> None:
        guard.reset()
        passed = passing(history)
        assert [_let(guard, *entry) for entry in history] == passed
        assert guard.last() == max(
            (token for (token, _), passes in zip(history, passed, strict=True) if passes), default=None
        )

    check()


def _let(guard: Guard, token: int, shared: bool) -> bool:  # noqa: FBT001 - a value, not a switch
    try:
        guard.accept(token, shared=shared)
    except lockkit.StaleToken:
        return False
    return True
