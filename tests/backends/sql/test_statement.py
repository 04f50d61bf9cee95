"""The pure parts below the SQL backends: spelling of statements, reading of errors."""

from __future__ import annotations

import sqlite3
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockkit.backends.sql.connection import Statement
from lockkit.backends.sql.dialect import mysql_kind, postgresql_kind, sqlite_kind, translate
from lockkit.backends.sql.postgresql import _pack
from lockkit.errors import BackendUnavailable, ConfigurationError


@pytest.mark.parametrize(
    ("text", "values", "filled"),
    [
        # Each parameter as often as it stands there; a percent sign that is none stays one.
        ("SELECT $2, $1, strftime('%s', $2)", "ab", "SELECT <b>, <a>, strftime('%s', <b>)"),
        # $12 is not $1 and a 2.
        ("$12 $11 $10 $9 $8 $7 $6 $5 $4 $3 $2 $1", "abcdefghijkl", "<l> <k> <j> <i> <h> <g> <f> <e> <d> <c> <b> <a>"),
        # One of several texts for the same values may need fewer of them.
        ("EXECUTE p ($1)", "ab", "EXECUTE p (<a>)"),
        # $$1 is the other statement's $1.
        (
            "PREPARE p AS SELECT $$1;SET x = $2;EXECUTE p ($1)",
            "ab",
            "PREPARE p AS SELECT $1;SET x = <b>;EXECUTE p (<a>)",
        ),
    ],
)
def test_values_are_written_into_a_statement(text: str, values: str, filled: str) -> None:
    """Those that it has, as the driver spells them."""
    assert Statement(text).filled("<{}>".format, values) == filled.encode()


def test_parameters_are_packed_for_postgresql() -> None:
    """Arrays keep quotes, backslashes, commas, braces and empty text apart; subclasses of str are text."""

    class Name(str):
        __slots__ = ()

    assert _pack(["ä", 7, None, b"x", Name("n")]) == ["ä".encode(), b"7", None, b"x", b"n"]
    assert _pack([["a,b", 'c"d', "e\\f", "", "{}", "NULL"]]) == [rb'{"a,b","c\"d","e\\f","","{}","NULL"}']


def failure(**attributes: object) -> Any:  # noqa: ANN401 - an exception with attributes that no class declares
    """Make an exception as a driver does."""
    made = type("Failure", (Exception,), attributes)
    return made(attributes.get("text", ""))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (failure(sqlstate="40001"), "stale"),
        (failure(pgcode="40P01"), "deadlock"),
        (failure(sqlstate="0A000", text="cached plan must not change result type"), "unprepared"),
        (failure(sqlstate="0A000", text="not supported by this server"), "other"),
        (failure(sqlstate="28P01"), "login"),
        (failure(sqlstate="57P01"), "connection"),
        (failure(sqlstate="57014"), "timeout"),
        (failure(sqlstate="22003"), "other"),
        (failure(text='FATAL:  password authentication failed for user "x"'), "login"),
        (failure(text='FATAL:  database "nosuch" does not exist'), "no database"),
        (failure(text="FATAL:  sorry, too many clients already"), "crowded"),
        (failure(text='FATAL:  permission denied for database "x"'), "login"),
        (failure(text='FATAL:  role "x" does not exist'), "login"),
        (failure(text='FATAL:  database "x" is not currently accepting connections'), "no database"),
        (failure(text='root certificate file "/root/.postgresql/root.crt" does not exist'), "tls"),
        (failure(text="server does not support SSL, but SSL was required"), "tls"),
        (failure(text="connection refused"), "connection"),
        (Exception({"C": "42P01"}), "no table"),
        (TimeoutError(), "timeout"),
    ],
)
def test_postgresql_errors_are_read(error: BaseException, kind: str) -> None:
    """By code where there is one, by text where the connection was refused."""
    assert postgresql_kind(error) == kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Exception(1213, "Deadlock found"), "deadlock"),
        (Exception(1146, "no table"), "no table"),
        (Exception(1290, "--read-only"), "read-only"),
        (Exception(1290, "--max-session-mem-used=2000000"), "other"),
        (Exception(2006, "server has gone away"), "connection"),
        (Exception(2013, "Lost connection (timed out)"), "timeout"),
        (Exception(1064, "syntax"), "other"),
        (Exception(1862, "Your password has expired"), "login"),
        (Exception(3159, "Connections using insecure transport are prohibited"), "tls"),
        (Exception(4151, "Access denied, this account is locked"), "login"),
        (Exception(4031, "disconnected by the server because of inactivity"), "connection"),
        (Exception(3105, "a number of MySQL 8"), "other"),
        (Exception(2003, "Can't connect ([SSL: CERTIFICATE_VERIFY_FAILED] self-signed)"), "tls"),
        (Exception("no number"), "connection"),
    ],
)
def test_mysql_errors_are_read(error: BaseException, kind: str) -> None:
    """By number; those from 2000 to 2999 are the client's."""
    assert mysql_kind(error) == kind


def test_sqlite_errors_are_read() -> None:
    """By the name of their code, else by their text."""
    connection = sqlite3.connect(":memory:")
    with pytest.raises(sqlite3.OperationalError) as caught:
        connection.execute("SELECT * FROM nosuch")
    assert sqlite_kind(caught.value) == "no table"
    connection.close()
    full = cast("BaseException", SimpleNamespace(sqlite_errorname="SQLITE_FULL"))
    assert sqlite_kind(full) == "full"
    assert sqlite_kind(TimeoutError()) == "timeout"


def test_errors_say_where_and_what_to_do() -> None:
    """What may mend itself is unavailable, what somebody must mend is configuration."""
    unavailable, wrong = translate("full", "disk", "h:1/db"), translate("denied", "permission", "h:1/db")

    assert isinstance(unavailable, BackendUnavailable)
    assert isinstance(wrong, ConfigurationError)
    assert str(unavailable) == "h:1/db has no space left on its disk: nothing can be locked until there is some (disk)"
