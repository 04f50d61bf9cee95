"""
The tables of the modes in which a session is the lock.

`rows_table`: what is locked in mode=row, one row for each name. `leases_table`: who holds what, written by the holder
once it has the lock: its token, and its session, by which others see whether it still holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column, MetaData, Table, Text
from sqlalchemy.dialects.mysql import MEDIUMTEXT, VARBINARY
from sqlalchemy.dialects.postgresql import TEXT as PG_TEXT

from lockkit.backends.sql.schema import with_fillfactor

if TYPE_CHECKING:
    from sqlalchemy.types import TypeEngine

__all__ = ["ADVISORY", "ROWS", "leases_name", "leases_table", "rows_table"]

ROWS = "lockkit_rows"
"""Name of the table of rows unless ``table=`` says otherwise; its leases are in ``lockkit_rows_leases``."""

ADVISORY = "lockkit_advisory"
"""Name of the table of leases of mode=advisory unless ``table=`` says otherwise."""


def rows_table(metadata: MetaData | None = None, name: str = ROWS) -> Table:
    """Describe the rows that are locked. Names are compared as bytes."""
    schema, _, plain = name.rpartition(".")
    key = Column("name", _key(), primary_key=True)
    return Table(plain, metadata or MetaData(), key, schema=schema or None, mysql_engine="InnoDB")


def leases_name(rows: str) -> str:
    """Name the table of leases that belongs to a table of rows."""
    return f"{rows}_leases"


def leases_table(metadata: MetaData | None = None, name: str = ADVISORY) -> Table:
    """Describe the table that says who holds what, or held it last. Times are µs since 1970, database clock."""
    schema, _, plain = name.rpartition(".")
    table = Table(
        plain,
        metadata or MetaData(),
        Column("name", _key(), primary_key=True),
        Column("owner", _key(), nullable=False),
        Column("token", BigInteger, nullable=False),
        Column("granted_at_us", BigInteger, nullable=False),
        # Of the holder: its transaction on PostgreSQL in mode=row, else its connection.
        Column("session", BigInteger, nullable=False),
        Column("metadata", Text().with_variant(MEDIUMTEXT(charset="utf8mb4"), "mysql", "mariadb"), nullable=False),
        schema=schema or None,
        mysql_engine="InnoDB",
    )
    return with_fillfactor(table)


def _key() -> TypeEngine[str]:
    key: TypeEngine[str] = PG_TEXT(collation="C").with_variant(VARBINARY(255), "mysql", "mariadb")
    return key
