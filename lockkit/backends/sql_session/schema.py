"""
The tables of the modes in which a session is the lock.

Of rows, in mode=row: what is locked, one row for each name. Of leases: who holds what, written by the holder once it
has the lock: its token, and its session, by which others see whether it still holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import BigInteger, Column, MetaData, Table, Text
from sqlalchemy.dialects.mysql import MEDIUMTEXT, VARBINARY
from sqlalchemy.dialects.postgresql import TEXT as PG_TEXT

from lockkit.backends.sql.schema import with_fillfactor

if TYPE_CHECKING:
    from sqlalchemy.types import TypeEngine


ROWS = "lockkit_rows"
"""Name of the table of rows unless ``table=`` says otherwise; its leases are in ``lockkit_rows_leases``."""

ADVISORY = "lockkit_advisory"
"""Name of the table of leases of mode=advisory unless ``table=`` says otherwise."""


def row_tables(name: str) -> list[Table]:
    """Describe the rows that are locked, and their leases. Names are compared as bytes."""
    schema, _, plain = name.rpartition(".")
    key = Column("name", _key(), primary_key=True)
    rows = Table(plain, MetaData(), key, schema=schema or None, mysql_engine="InnoDB")
    return [rows, *advisory_tables(f"{name}_leases")]


def advisory_tables(name: str) -> list[Table]:
    """Describe the table that says who holds what, or held it last. Times are µs since 1970, database clock."""
    schema, _, plain = name.rpartition(".")
    table = Table(
        plain,
        MetaData(),
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
    return [with_fillfactor(table)]


def _key() -> TypeEngine[str]:
    key: TypeEngine[str] = PG_TEXT(collation="C").with_variant(VARBINARY(255), "mysql", "mariadb")
    return key
