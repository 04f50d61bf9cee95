"""Uses what works inside an application's transactions as its users do. Checked, never run."""

from __future__ import annotations

from typing import assert_type

from sqlalchemy import Connection, Engine, Update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

import lockkit
from lockkit.fencing import AsyncSqlGuard, SqlGuard, fenced
from lockkit.optimistic import transact, transact_async, versioned
from lockkit.sql import TransactionLock, create_tables, lock_in


def blocking(engine: Engine, session: Session, connection: Connection, statement: Update) -> None:
    """With a session, a connection and an engine."""
    assert_type(lock_in(session, "x", timeout=5), TransactionLock)
    assert_type(lock_in(connection, "x").token, int)
    assert_type(lockkit.sql.lock_in(connection, "x").name, str)
    create_tables(engine)
    guard = SqlGuard(session)
    assert_type(guard.execute(statement, token=1), int)
    assert_type(guard.last("x"), int | None)
    assert_type(fenced(statement, 1), Update)
    assert_type(versioned(statement, 1), Update)
    assert_type(transact(engine, lambda _: 5), int)


async def asynchronous(engine: AsyncEngine, session: AsyncSession, connection: AsyncConnection) -> None:
    """The same, awaited."""
    assert_type(await lock_in(session, "x", timeout=5), TransactionLock)
    assert_type(await lock_in(connection, "x"), TransactionLock)
    await create_tables(engine)
    await AsyncSqlGuard(session).accept("x", token=1)

    async def work(_: AsyncConnection) -> str:
        return "done"

    assert_type(await transact_async(engine, work), str)
