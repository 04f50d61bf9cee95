"""What the lock backends of all modes share: how they get their database, and what they do with its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from lockkit.backend import Host, LockBackend, Option
from lockkit.backends.sql.connection import Statement
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.options import adopt_database, driver_options, open_database
from lockkit.backends.sql.schema import Table, drop
from lockkit.url import Url

_PING = Statement("SELECT 1")


class SqlBackend(LockBackend):
    """One mode of locks in one kind of database."""

    tables: Sequence[Table]  # what there must be in the database; ``lockkit migrate`` makes them
    _dialect: ClassVar[str]
    """The name of `lockkit.backends.sql.dialect.Dialect`."""

    def __init__(self, database: Database, options: Mapping[str, Any], host: Host) -> None:
        del options
        self.database = database
        self._runtime = host.runtime

    @classmethod
    def driver_options(cls) -> Mapping[str, Option]:
        return driver_options(cls._dialect)

    @classmethod
    def examiner(cls, url: Url) -> str | None:
        del url
        return "lockkit.backends.sql.examine"

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> Self:
        return cls(open_database(url, options, cls.options, host), options, host)

    @classmethod
    def adopt(cls, client: object, options: Mapping[str, Any], host: Host) -> Self | None:
        """See `LockBackend.adopt`: a SQLAlchemy `Engine` or `AsyncEngine`, whatever its driver."""
        database = adopt_database(client, host)
        if database is None or database.dialect.name != cls._dialect:
            return None
        return cls(database, options, host)

    @property
    def url(self) -> str:
        return self.database.url

    async def erase(self) -> None:
        await drop(self.database, self.tables)

    async def ping(self) -> None:
        await self.database.run(_PING, again=True)
