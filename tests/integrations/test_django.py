"""Locks in Django, with PostgreSQL and the example site."""

from __future__ import annotations

import asyncio
import importlib
import io
import os
import signal
import sys
import threading
import time
import unittest
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import django
import psycopg
import pytest
from django.conf import settings
from django.core import checks
from django.core.cache.backends.locmem import LocMemCache
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import OperationalError, connection, connections, transaction
from django.db.migrations.recorder import MigrationRecorder
from django.db.models.signals import pre_migrate
from django.test import Client, TestCase, override_settings

import lockkit
from lockkit.integrations.django import aio_client, client, from_connection
from lockkit.integrations.django.checks import SERVERS, register
from lockkit.integrations.django.clients import _aio_clients, environment_of, service
from lockkit.integrations.django.management.commands import locked, migrate_locked
from lockkit.integrations.migrations import LOCK_NAME
from lockkit.testing.timing import PATIENCE
from lockkit.url import parse
from lockkit_tools.servers import MariaServer, PostgresServer, require
from tests.conventions.sources import ROOT
from tests.programs import LIMIT, printed, python_group, run_python
from tests.tries import beside, busy, until

SITE = ROOT / "examples" / "django_site"
SECRET = "not-to-be-shown"  # noqa: S105 - what messages must not have


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[PostgresServer]:
    """PostgreSQL, and Django with two connections to it."""
    require("postgresql", local=True)
    with PostgresServer() as server:
        sys.path.insert(0, str(SITE))
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "postgres",
            "USER": "postgres",
            "PASSWORD": SECRET,
            "HOST": server.host,
            "PORT": server.port,
            "ATOMIC_REQUESTS": True,
        }
        settings.configure(
            DATABASES={"default": database, "other": {**database}},
            INSTALLED_APPS=["shop", "lockkit.integrations.django"],
            LOCKKIT={"default": "memory://django"},
            ROOT_URLCONF="shop.urls",
        )
        django.setup()
        yield server
        connections.close_all()
        sys.path.remove(str(SITE))


@pytest.fixture
def empty(server: PostgresServer) -> PostgresServer:
    """The server with an empty database."""
    connections.close_all()
    server.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return server


@pytest.fixture
def table() -> Iterator[None]:
    """A table ``made``."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE made (x integer)")
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE made")


def execute(statement: str, using: str = "default") -> list[tuple[Any, ...]]:
    """Run SQL on a connection of Django's."""
    with connections[using].cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else []


@contextmanager
def database(alias: str, **changes: object) -> Iterator[Any]:
    """Another database of the site's, like the first but for some settings."""
    connections.databases[alias] = connections.databases["default"] | changes
    try:
        yield connections[alias]
    finally:
        connections[alias].close()
        del connections[alias]
        del connections.databases[alias]


def status_without_waiting(**options: object) -> int:
    """The exit status of ``migrate_locked --timeout 0``; the same holds for it."""
    deadline = time.monotonic() + LIMIT
    while True:
        try:
            call_command("migrate_locked", timeout=0, verbosity=0, **options)
        except CommandError as error:
            if error.returncode != 69 or time.monotonic() > deadline:
                return int(error.returncode)
        else:
            return 0


# -- clients --------------------------------------------------------------------------------------------------------


def test_alias_has_one_client_in_all_threads() -> None:
    """It is made at first use."""
    found = [one.result(PATIENCE) for one in [beside(client) for _ in range(8)]]

    assert len(set(map(id, found))) == 1
    assert client().url == "memory://django"


def test_client_that_was_closed_is_replaced() -> None:
    """As ``with client() as one:`` closes it, and another view of the worker needs one."""

    async def close() -> None:
        async with aio_client() as one:
            assert one is aio_client()
        assert (await aio_client().holders("a")) == []

    with client() as one:
        assert one is client()
    assert client() is client()
    assert client().holders("a") == []
    asyncio.run(close())


def test_changed_settings_make_another_client() -> None:
    """A test's settings count at once, and its clients are closed after it. Other settings are none of its business."""
    before = client()
    with override_settings(DEBUG=True):
        assert client() is before
    with override_settings(LOCKKIT={"default": {"URL": "memory://x", "OPTIONS": {"ttl": 7}}}):
        changed = client()
        with changed.lock("a") as lease:
            assert (changed.url, lease.ttl) == ("memory://x", 7)

    assert client().url == before.url
    with pytest.raises(lockkit.LockError):
        changed.lock("a").acquire()


def test_without_the_setting_lockkit_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``lockkit.connect()``: here the environment."""
    monkeypatch.setenv("LOCKKIT_URL", f"file://{tmp_path}")
    with override_settings():
        del settings.LOCKKIT

        assert service("default").url is None
        from lockkit.integrations.django.clients import new_client  # noqa: PLC0415 - of the changed settings

        with new_client("default") as made:
            assert made.url == f"file://{tmp_path}"
    with override_settings(LOCKKIT_URL="redis://locks.example", CELERY_LOCKKIT_URL="redis://locks.example"):
        del settings.LOCKKIT
        with pytest.raises(lockkit.ConfigurationError, match=r"settings\.LOCKKIT_URL has no effect: write LOCKKIT ="):
            service("default")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ([], "must be a dict"),
        ({"x": "memory://"}, "no alias 'default', only 'x'"),
        ({}, "no alias 'default', it is empty"),
        ({"default": 3}, "must be a URL, or a dict"),
        ({"default": {"url": f"redis://:{SECRET}@h"}}, "unknown key 'url' (did you mean 'URL'?)"),
        ({"default": {"URL": "memory://", "OPTION": {}}}, "unknown key 'OPTION' (did you mean 'OPTIONS'?)"),
        ({"default": {"LOCATION": f"redis://:{SECRET}@h"}}, "unknown key 'LOCATION'"),
        ({"default": {"URL": "memory://", "DATABASE": "default"}}, "only one of"),
        ({"default": {"URL": 3}}, "must be strings"),
        ({"default": {"URL": "memory://", "OPTIONS": 3}}, "OPTIONS a dict"),
        ({"default": {"DATABASE": "absent"}}, "no alias 'absent'"),
        ({"default": {"URL": "memory://", "OPTIONS": {"profile": "p"}}}, "not 'profile'"),
        ({"default": {"URL": "memory://", "OPTIONS": {1: 2}}}, "not 1"),
        ({"default": {"DATABASE": "default", "OPTIONS": {"connection": 1}}}, "not 'connection'"),
        ({"default": {"DATABASE": "default", "OPTIONS": {"mode": "row"}}}, "not of mode='row'"),
        ({"default": {"URL": f"redis://:{SECRET}@h", "OPTIONS": {"ttl": -1}}}, "ttl"),
        ({"default": f"nothing://:{SECRET}@h"}, "nothing"),
    ],
)
def test_wrong_setting_is_an_error_and_a_finding(setting: object, says: str) -> None:
    """At the first use, and before by the system check. Neither shows a password."""
    with override_settings(LOCKKIT=setting):
        with pytest.raises(lockkit.ConfigurationError) as caught:
            client()
        findings = checks.run_checks(tags=["lockkit"])

    assert says in str(caught.value)
    assert SECRET not in str(caught.value)
    if setting not in ({"x": "memory://"}, {}):  # a site may use other aliases only, or none
        assert [(one.id, says in one.msg) for one in findings] == [("lockkit.E001", True)]


def test_event_loop_has_clients_of_its_own() -> None:
    """One for each alias; those of loops that have ended are forgotten."""

    async def use() -> object:
        assert aio_client() is aio_client()
        async with aio_client().lock("a", timeout=PATIENCE) as lease:
            assert lease.held
        database = override_settings(LOCKKIT={"sql": {"DATABASE": "default"}})
        with database, pytest.raises(lockkit.ConfigurationError, match="give a URL"):
            aio_client("sql")
        return aio_client()

    async def look() -> object:
        return aio_client()

    first, second = asyncio.run(use()), asyncio.run(look())

    assert first is not second
    assert [clients["default"] for clients in _aio_clients.values()] == [second]


def test_changed_settings_count_for_a_loop_that_still_runs() -> None:
    """As for threads."""

    async def use() -> None:
        before = aio_client()
        with override_settings(LOCKKIT={"default": "memory://other"}):
            assert aio_client().url == "memory://other"
        assert aio_client().url == before.url

    asyncio.run(use())


# -- transactions ---------------------------------------------------------------------------------------------------


def test_usual_way_lets_the_next_one_in_before_it_can_see_the_data(table: None) -> None:
    """A lock that is released inside ``atomic``, of whichever library: the next holder reads the state before."""
    del table
    with lockkit.connect("memory://usual") as usual, transaction.atomic():
        with usual.lock("seat"):
            execute("INSERT INTO made VALUES (1)")
        with usual.lock("seat", timeout=0):
            assert execute("SELECT count(*) FROM made", "other") == [(0,)]


def test_lock_is_free_after_the_commit_only(table: None) -> None:
    """So that who waits for the lock sees what was written under it."""
    del table

    def wait() -> object:
        with client().lock("seat", timeout=PATIENCE):
            seen = execute("SELECT count(*) FROM made")
        connection.close()
        return seen

    with transaction.atomic():
        with client().lock("seat", timeout=PATIENCE, until_commit=True) as lease:
            execute("INSERT INTO made VALUES (1)")
            waiter = beside(wait)
            until(lambda: bool(client().holders("seat")[0].waiters))
        assert lease.held
        lease.release()
        assert lease.held

    assert waiter.result(PATIENCE) == [(1,)]


@pytest.mark.parametrize("how", ["rollback", "failing hook", "close", "set_rollback"])
def test_lock_is_free_after_every_other_end(how: str) -> None:
    """Django says nothing of a rollback, and a callback that fails keeps the next ones from being called."""

    def fail() -> None:
        raise RuntimeError(how)

    lock = client().lock("seat", timeout=PATIENCE, until_commit=True)
    with suppress(RuntimeError), transaction.atomic():
        if how == "failing hook":
            transaction.on_commit(fail)
        with lock:
            execute("SELECT 1")
        assert lock.locked()
        if how == "rollback":
            fail()
        elif how == "close":
            connection.close()
        elif how == "set_rollback":
            transaction.set_rollback(True)
    connection.close()

    assert not lock.locked()


def test_until_commit_is_a_switch() -> None:
    """As other switches: any text counted as True."""
    with pytest.raises(lockkit.ConfigurationError, match=r"^until_commit must be True or False, not 'no'"):
        client().lock("a", until_commit="no")  # type: ignore[call-overload] # wrong on purpose


def test_set_refuses_a_lock_that_ends_with_the_transaction() -> None:
    """A set releases without asking the lock: it would be free before the commit."""
    with pytest.raises(lockkit.ConfigurationError, match="until_commit=True"):
        lockkit.locks([client().lock("b"), client().lock("a", until_commit=True)])

    with lockkit.locks([client().lock("a", until_commit=False), client().lock("b")]) as leases:
        assert leases.held


def test_savepoint_s_rollback_frees_the_lock() -> None:
    """As those that a database takes in a savepoint: what was written under it is gone."""
    lock = client().lock("seat", timeout=PATIENCE, until_commit=True)
    with transaction.atomic():
        with suppress(ZeroDivisionError), transaction.atomic():
            with lock:
                execute("SELECT 1")
            assert lock.locked()
            raise ZeroDivisionError
        assert not lock.locked()


def test_lock_waits_for_all_databases() -> None:
    """Both transactions may have written what it protects."""
    lock = client().lock("seat", timeout=PATIENCE, until_commit=True)
    with transaction.atomic():
        with transaction.atomic("other"):
            with lock:
                execute("SELECT 1")
            assert lock.locked()
        assert lock.locked()

    assert not lock.locked()


def test_without_a_transaction_nothing_is_postponed() -> None:
    """Of three kinds: none at all, one that ended inside the lock, and one that is told to be of no concern."""
    lock = client().lock("seat", timeout=PATIENCE, until_commit=True)
    with lock:
        pass
    assert not lock.locked()
    with client().lock("seat", timeout=PATIENCE), transaction.atomic():
        execute("SELECT 1")
    assert not lock.locked()
    with transaction.atomic():
        with client().lock("seat", timeout=PATIENCE, until_commit=False):
            pass
        assert not lock.locked()


def test_release_inside_a_transaction_is_refused() -> None:
    """By ``with``, as a decorator, by ``attempt`` and by hand; the lock stays held until the transaction ends."""
    lock = client().lock("seat", timeout=PATIENCE)
    decorated = lock(lambda: pytest.fail("it ran"))

    def attempt() -> None:
        with lock.attempt():
            pytest.fail("it ran")

    def by_hand() -> None:
        lock.acquire().release()

    def block() -> None:
        with lock:
            pytest.fail("it ran")

    for use in (block, decorated, attempt, by_hand):
        with transaction.atomic():
            with pytest.raises(lockkit.LockError, match="until_commit=True"):
                use()
            assert lock.locked()
        assert not lock.locked()


def test_inner_block_of_a_reentrant_lock_frees_nothing() -> None:
    """So it may lie inside a transaction that the outer one encloses."""
    lock = client().lock("seat", timeout=PATIENCE, reentrant=True)
    with lock as outer, transaction.atomic():
        with lock as inner:
            assert inner is outer
        assert lock.locked()

    assert not lock.locked()


def test_transaction_may_take_its_lock_again() -> None:
    """It would wait for itself."""
    with transaction.atomic():
        tokens = []
        for _ in range(3):
            with client().lock("seat", timeout=PATIENCE, until_commit=True) as lease:
                tokens.append(lease.token)
        assert len(set(tokens)) == 1
        assert client().lock("seat").locked()

    assert not client().lock("seat").locked()


def test_loss_before_the_commit_rolls_back(table: None) -> None:
    """Leaving ``with`` raises, inside the transaction."""
    del table
    with pytest.raises(lockkit.LockLost), transaction.atomic():  # noqa: PT012 - where it is raised is the point
        with client().lock("seat", ttl=0.3, timeout=PATIENCE, until_commit=True) as lease:
            execute("INSERT INTO made VALUES (1)")
            client().break_lock("seat")
            assert lease.wait_lost(PATIENCE)
        pytest.fail("the loss went unseen")

    assert execute("SELECT count(*) FROM made") == [(0,)]


def test_loss_after_the_block_and_before_the_commit_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It cannot stop the commit any more, and must not look like a failure of what Django calls after it."""
    with transaction.atomic():
        with client().lock("seat", ttl=0.3, timeout=PATIENCE, until_commit=True) as lease:
            execute("SELECT 1")
        client().break_lock("seat")
        assert lease.wait_lost(PATIENCE)

    assert [one.levelname for one in caplog.records if "a transaction ended after the lock" in one.message] == ["ERROR"]


def test_body_s_error_goes_on() -> None:
    """The refusal hides nothing."""
    lease = client().lock("seat", timeout=PATIENCE).acquire()
    with transaction.atomic():
        lease.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        assert lease.held

    assert not client().lock("seat").locked()


def test_transaction_around_a_django_test_case_is_none() -> None:
    """What works outside of tests works in a ``TestCase`` too."""

    class Case(TestCase):
        databases = frozenset({"default", "other"})

        def test_plain(self) -> None:
            lock = client().lock("seat", timeout=PATIENCE)
            with lock, transaction.atomic():
                execute("SELECT 1")
            assert not lock.locked()

        def test_commit(self) -> None:
            lock = client().lock("seat", timeout=PATIENCE, until_commit=True)
            with self.captureOnCommitCallbacks(execute=True), transaction.atomic(), lock:
                execute("SELECT 1")
            assert not lock.locked()

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)

    assert (result.testsRun, result.errors, result.failures) == (2, [], [])


# -- locks in the database ------------------------------------------------------------------------------------------


def test_database_s_locks_are_rows_outside_of_its_transactions(empty: PostgresServer) -> None:
    """They exclude other clients of the database, and a rollback takes nothing from them."""
    with from_connection(connection) as one, lockkit.connect(empty.url) as other:
        with transaction.atomic():
            lease = one.lock("seat", timeout=PATIENCE, until_commit=False).acquire()
            transaction.set_rollback(True)
        assert lease.confirm()
        assert busy(other.lock("seat"))
        assert SECRET not in one.url
        lease.release()
        assert not other.lock("seat").locked()


@pytest.mark.slow  # PostgreSQL waits five seconds for the connection to end
def test_client_keeps_django_from_dropping_its_test_database() -> None:
    """It has a connection of its own. After close(), nothing does."""
    with database("tested") as tested, override_settings(LOCKKIT={"default": {"DATABASE": "tested"}}):
        tested.creation.create_test_db(verbosity=0, autoclobber=True)
        with client().lock("a", timeout=PATIENCE):
            pass
        with pytest.raises(OperationalError, match="is being accessed by other users"):
            tested.creation.destroy_test_db("postgres", verbosity=0)

        client().close()
        tested.creation.destroy_test_db("postgres", verbosity=0)


def test_connections_of_the_locks_are_as_the_database_s_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """But rows come as the driver gives them, and a connection is closed with its client, not kept in a pool."""
    wrapper = type(connections[connection.alias])  # each thread has one
    parameters, connect = wrapper.get_connection_params, psycopg.connect
    options = {"connect_timeout": 3, "sslmode": "prefer", "cursor_factory": 1, "context": 2}
    monkeypatch.setattr(wrapper, "get_connection_params", lambda self: {**parameters(self), **options})
    given: list[dict[str, Any]] = []
    made: list[Any] = []

    def noted(**arguments: Any) -> object:
        given.append(arguments)
        made.append(connect(**arguments))
        return made[-1]

    monkeypatch.setattr(psycopg, "connect", noted)
    with from_connection(connection) as one, one.lock("seat", timeout=PATIENCE):
        assert made
    assert all(one.closed for one in made)
    assert (given[0]["connect_timeout"], given[0]["sslmode"]) == (3, "prefer")
    assert given[0].keys().isdisjoint({"cursor_factory", "context"})


def test_locks_in_mariadb(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in PostgreSQL; PyMySQL stands for mysqlclient, which needs a compiler."""
    require("mariadb", local=True)
    pymysql = importlib.import_module("pymysql")  # has no types
    monkeypatch.setitem(sys.modules, "MySQLdb", pymysql)
    monkeypatch.setattr(pymysql, "version_info", (2, 2, 1, "final", 0))
    with MariaServer() as server:
        url = parse(server.url)
        place = {"NAME": url.path.strip("/"), "USER": url.username, "PASSWORD": url.password or "", "PORT": url.port}
        with database("maria", ENGINE="django.db.backends.mysql", **place) as maria:
            maria.settings_dict["OPTIONS"] = {"ssl_mode": "disabled", "local_infile": True}  # mysqlclient's
            environment = environment_of("maria")
            maria.settings_dict["OPTIONS"] = {"ssl_mode": "VERIFY_CA", "ssl": {"ca": "/own.pem"}}
            with pytest.raises(lockkit.ConfigurationError, match="'ssl', which is neither"):
                environment_of("maria")
            maria.settings_dict["OPTIONS"] = {}
            made = from_connection(maria)
            with made, made.lock("seat", timeout=PATIENCE), lockkit.connect(server.url) as other:
                assert busy(other.lock("seat"))
                with lockkit.connect(environment["LOCKKIT_URL"]) as another:
                    assert busy(another.lock("seat"))
            call_command("migrate_locked", database="maria", verbosity=0)
            assert list(execute("SELECT count(*) FROM django_migrations", "maria")) == [(2,)]


def test_lockkit_s_from_client_says_what_to_call() -> None:
    """A connection of Django's is inside the application's transactions."""
    with pytest.raises(lockkit.ConfigurationError, match=r"django\.from_connection"):
        lockkit.from_client(connection)
    with pytest.raises(lockkit.ConfigurationError, match="not str"):
        from_connection("default")


def test_other_databases_are_refused_or_locked_by_files(tmp_path: Path) -> None:
    """Files beside SQLite; nothing for what is in memory, or unknown."""
    with database("lite", ENGINE="django.db.backends.sqlite3", NAME=tmp_path / "site.db") as lite:
        with from_connection(lite) as made, made.lock("a", timeout=PATIENCE):
            assert (tmp_path / "site.db-lockkit").is_dir()
            assert environment_of("lite") == {"LOCKKIT_URL": made.url}
        lite.settings_dict["NAME"] = "file:memorydb_default?mode=memory&cache=shared"
        with pytest.raises(lockkit.ConfigurationError, match="memory://"):
            from_connection(lite)
        lite.vendor = "oracle"
        with pytest.raises(lockkit.ConfigurationError, match="cannot lock"):
            from_connection(lite)


# -- checks ---------------------------------------------------------------------------------------------------------


def test_deployment_check_names_aliases_of_one_process_or_machine(tmp_path: Path) -> None:
    """With ``check --deploy`` only."""
    setting = {"default": "memory://", "file": f"file://{tmp_path}", "sql": {"DATABASE": "default"}}
    with override_settings(LOCKKIT=setting):
        assert checks.run_checks(tags=["lockkit"]) == []
        found = checks.run_checks(tags=["lockkit"], include_deployment_checks=True)

    assert [one.id for one in found] == ["lockkit.W001", "lockkit.W002"]
    assert all(one.hint for one in found)


@pytest.mark.parametrize(
    ("debug", "given", "url", "usual", "deploying"),
    [
        (False, {}, None, ["W003"], ["W003"]),
        (True, {}, None, [], ["W003"]),
        (False, {"LOCKKIT": {"default": {"OPTIONS": {"ttl": 9}}, "x": "file:"}}, None, ["W003"], ["W003", "W002"]),
        (False, {"LOCKKIT": {"default": "file:"}}, None, [], ["W002"]),
        (False, {}, "file:", [], ["W002"]),
        (False, {}, "redis://h", [], []),
        (False, {"LOCKKIT": {}}, None, [], []),
        (False, {"LOCKKITS": {}}, None, ["E001"], ["E001"]),
    ],
)
def test_site_that_says_nothing_of_its_locks_is_told_where_they_are(
    given: dict[str, Any],
    url: str | None,
    usual: list[str],
    deploying: list[str],
    *,
    debug: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In production, and before it. In development, tests included, files of the machine are right."""
    monkeypatch.chdir(tmp_path)
    if url is not None:
        monkeypatch.setenv("LOCKKIT_URL", url)
    registry = checks.registry.CheckRegistry()
    monkeypatch.setattr(checks, "register", registry.register)
    with override_settings(DEBUG=debug, **given):
        if "LOCKKIT" not in given:
            del settings.LOCKKIT
        register()
        settings.DEBUG = False  # as a test runner does once the site is set up
        found = [
            [one.id for one in registry.run_checks(tags=["lockkit"], include_deployment_checks=deploy)]
            for deploy in (False, True)
        ]

    assert found == [[f"lockkit.{one}" for one in expected] for expected in (usual, deploying)]


def test_server_check_is_asked_for_by_its_tag() -> None:
    """A site must start although its lock service does not answer yet."""
    setting = {"default": f"redis://:{SECRET}@127.0.0.1:1", "other": "memory://"}
    with override_settings(LOCKKIT=setting):
        for deploy, databases in ((False, None), (True, None), (False, ["default"])):
            found = checks.run_checks(include_deployment_checks=deploy, databases=databases)
            assert "lockkit.E002" not in [one.id for one in found]
        found = checks.run_checks(tags=[SERVERS], include_deployment_checks=True, databases=["default"])

    assert [one.id for one in found] == ["lockkit.E002"]
    assert SECRET not in found[0].msg
    with override_settings(LOCKKIT=[]):  # which lockkit.E001 says
        assert checks.run_checks(tags=[SERVERS], include_deployment_checks=True, databases=["default"]) == []


# -- manage.py locked -----------------------------------------------------------------------------------------------


def test_locked_passes_on_the_service_and_the_status(tmp_path: Path) -> None:
    """By `call_command` a failure is an error; the lock service is that of the alias."""
    script = "import lockkit; raise SystemExit(3 if lockkit.connect().holders('NAME')[0].remaining > 40 else 4)"
    with override_settings(LOCKKIT={"x": {"URL": "redis://h/0?ttl=1&db=2", "OPTIONS": {"ttl": 50, "fencing": False}}}):
        found = locked._environment(service("x"))["LOCKKIT_URL"]
    file = override_settings(LOCKKIT={"x": {"URL": f"file://{tmp_path}", "OPTIONS": {"ttl": 600}}})
    with file, pytest.raises(CommandError, match="status 3") as caught:
        call_command("locked", "NAME", alias="x", command=[sys.executable, "-c", script])

    assert found == "redis://h/0?db=2&ttl=50&fencing=0"
    assert caught.value.returncode == 3


def test_locked_runs_nothing_that_lies_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of that name there would run as the job's user; the command's own Python finds what it always does."""
    for name in ("typer", "lockkit", "json", "rich"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'a').write(__name__ + ' '); raise ImportError(__name__)")
    (tmp_path / "mine.py").write_text("open('found', 'w').close()")
    monkeypatch.chdir(tmp_path)

    with override_settings(LOCKKIT={"default": {"URL": f"file://{tmp_path}/locks"}}):
        call_command("locked", "NAME", command=[sys.executable, "-m", "mine"])

    assert (tmp_path / "found").exists()
    assert not (tmp_path / "ran").exists()


def test_locked_refuses_what_it_cannot_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a message, and the exit status of a usage or configuration error."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"DATABASE": "absent"}, "no alias 'absent'"),
        ({"OPTIONS": {"ttl": 3}}, "without a URL"),
        ({"URL": "memory://", "OPTIONS": {"ttl": [3]}}, "neither text nor a number"),
    ]
    for entry, says in cases:
        with override_settings(LOCKKIT={"default": entry}), pytest.raises(CommandError, match=says) as caught:
            call_command("locked", "NAME", command=["true"])
        assert caught.value.returncode == 78
    monkeypatch.setenv("LOCKKIT_URL", "memory://")  # which would win
    with override_settings(LOCKKIT={"default": {"PROFILE": "p"}}):
        found = locked._environment(service("default"))
    assert (found["LOCKKIT_ENV"], found.get("LOCKKIT_URL")) == ("p", None)
    with pytest.raises(CommandError, match="after --") as caught:
        call_command("locked", "NAME")
    assert caught.value.returncode == 2


def test_site_with_locks_in_its_database_only(tmp_path: Path) -> None:
    """A settings file as the page shows it: views and `manage.py locked` exclude each other."""
    options = {"application_name": "a site", "options": "-c search_path=public"}
    database = {**settings.DATABASES["default"], "OPTIONS": options}
    (tmp_path / "settings.py").write_text(
        f'INSTALLED_APPS = ["lockkit.integrations.django"]\nDATABASES = {{"default": {database!r}}}\n'
        'LOCKKIT = {"default": {"DATABASE": "default", "OPTIONS": {"ttl": 600}}}\n'
    )
    (tmp_path / "job.py").write_text(
        "import django; django.setup()\n"
        "from lockkit.integrations.django import client\n"
        "(holder,) = client().holders('report')\n"
        "print(client().lock('report').try_acquire(), holder.remaining > 100)\n"
    )
    locked = ["-m", "django", "locked", "report", "--timeout", "0", "--", sys.executable, "job.py"]
    ran = run_python(*locked, cwd=tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}", DJANGO_SETTINGS_MODULE="settings")

    assert (ran.stdout, ran.stderr, ran.returncode) == ("None True\n", "", 0)


def test_environment_of_a_database_leads_to_it() -> None:
    """A socket, a port of text, characters that a URL escapes, and options; what it cannot have is named."""
    given = {"USER": "u:1", "PASSWORD": "p@/?$", "HOST": "/run/postgresql", "PORT": "5433", "NAME": "it's here"}
    options = {"sslmode": "require", "options": "-c search_path=app"}
    with database("lite", **given, OPTIONS=options) as lite:
        environment = environment_of("lite")
        found = parse(environment["LOCKKIT_URL"])
        assert (found.username, found.password, found.path) == ("u:1", "p@/?$", "/it's here")
        assert (found.host, found.port, dict(found.query)) == ("/run/postgresql", 5433, {"sslmode": "require"})
        assert environment["PGOPTIONS"] == "-c search_path=app"
        with lockkit.connect(environment["LOCKKIT_URL"]) as accepted:
            assert "p@" not in accepted.url
        lite.settings_dict["OPTIONS"]["sslrootcert"] = b"raw"
        with pytest.raises(lockkit.ConfigurationError, match="the option 'sslrootcert', which is neither"):
            environment_of("lite")


# -- manage.py migrate_locked ---------------------------------------------------------------------------------------


def migrate(server: PostgresServer, kind: str, processes: int) -> tuple[list[str], str]:
    """Run the migrations of the example in processes; return how each ended, and their errors."""
    module = "tests.integrations.django_migrators"
    done = run_python("-W", "ignore", "-m", module, str(processes), kind, cwd=SITE, **site_environment(server))
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("status"))
    assert len(said) == processes, done.stdout + done.stderr
    return said, done.stderr


def site_environment(server: PostgresServer) -> dict[str, str]:
    """What the example needs."""
    return {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{SITE}",
        "DJANGO_SETTINGS_MODULE": "shop.settings",
        "DATABASE_URL": server.url,
    }


def index_is_valid() -> bool:
    """Whether the index is there that the last migration makes."""
    return execute("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass('sales_of_seat')") == [(True,)]


def test_four_processes_migrate_once(empty: PostgresServer) -> None:
    """All end well, though one migration makes an index concurrently."""
    said, errors = migrate(empty, "migrate_locked", 4)

    assert said == ["status 0"] * 4, errors
    assert index_is_valid()


def test_django_alone_does_not_exclude(empty: PostgresServer) -> None:
    """Two processes that have read the same state apply the same migration, and one fails (Django has no lock)."""
    MigrationRecorder(connection).ensure_schema()

    said, errors = migrate(empty, "migrate", 2)

    assert said == ["status 0", "status 1"]
    assert "duplicate key" in errors or "already exists" in errors


def test_nothing_to_migrate_needs_no_lock(empty: PostgresServer) -> None:
    """Nor do commands that change nothing; what has something to do waits, or ends with 75."""
    del empty
    with from_connection(connection) as other:
        with other.lock(LOCK_NAME, timeout=PATIENCE):
            call_command("migrate_locked", plan=True, verbosity=0)
            assert status_without_waiting() == 75
        call_command("migrate_locked", verbosity=0)
        assert index_is_valid()

        with other.lock(LOCK_NAME, timeout=PATIENCE):
            out = io.StringIO()
            call_command("migrate_locked", stdout=out)
            for options in ({"always": True}, {"app_label": "shop"}, {"run_syncdb": True}):
                assert status_without_waiting(**options) == 75
        assert out.getvalue() == "No migrations to apply.\n"
        with pytest.raises(CommandError, match="no alias 'absent'"):
            call_command("migrate_locked", lock_alias="absent")
        call_command("migrate_locked", "shop", "sales", verbosity=0)
        assert not index_is_valid()


def test_command_that_only_looks_waits_for_nobody(empty: PostgresServer) -> None:
    """``--check`` ends with 1, as in ``migrate``."""
    del empty
    other = from_connection(connection)
    with other, other.lock(LOCK_NAME, timeout=PATIENCE), pytest.raises(SystemExit) as caught:
        call_command("migrate_locked", check_unapplied=True, timeout=0, verbosity=0)
    assert caught.value.code == 1


def test_process_that_waited_does_not_migrate_again(empty: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it keep a connection open while it waits; one of the caller's transaction stays."""
    del empty
    call_command("migrate", verbosity=0)
    ran: list[object] = []

    def note(**given: object) -> None:
        ran.append(given)

    pre_migrate.connect(note)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(migrate_locked.Command, "_found_up_to_date", lambda *_: False)
            call_command("migrate_locked", verbosity=0)
    finally:
        pre_migrate.disconnect(note)
    assert ran == []

    call_command("migrate_locked", verbosity=0)
    assert connection.connection is None
    with transaction.atomic():
        call_command("migrate_locked", verbosity=0)
        execute("SELECT 1")


def test_database_in_memory_needs_no_lock() -> None:
    """Unless an alias is named: then another process is kept out all the same."""
    with database("lite", ENGINE="django.db.backends.sqlite3", NAME=":memory:"):
        with client().lock(f"{LOCK_NAME}::memory:", timeout=PATIENCE):
            assert status_without_waiting(database="lite", lock_alias="default") == 75
        call_command("migrate_locked", database="lite", verbosity=0)
        assert execute("SELECT count(*) FROM shop_sale", "lite") == [(0,)]


def test_database_that_does_not_answer_has_a_status_of_its_own() -> None:
    """The same as on the command line of lockkit."""
    with database("gone", PORT=1), pytest.raises(CommandError) as caught:
        call_command("migrate_locked", database="gone")

    assert caught.value.returncode == 69
    assert SECRET not in str(caught.value)


def test_lock_may_be_another_service_s(empty: PostgresServer) -> None:
    """An alias of the settings; its lock has the name of the database."""
    del empty
    with client().lock(f"{LOCK_NAME}:postgres", timeout=PATIENCE):
        assert status_without_waiting(lock_alias="default") == 75
    call_command("migrate_locked", lock_alias="default", verbosity=0)

    assert index_is_valid()
    with override_settings(LOCKKIT={"default": 3}), pytest.raises(CommandError) as caught:
        call_command("migrate_locked", lock_alias="default", always=True)
    assert caught.value.returncode == 78


def test_no_further_migration_once_the_lock_is_lost(empty: PostgresServer) -> None:
    """Another process may be migrating."""
    del empty
    command = migrate_locked.Command()
    other = from_connection(connection)
    other.lock("connects", timeout=PATIENCE).acquire().release()

    def lose(**_: object) -> None:
        other.break_lock(LOCK_NAME)
        assert command._lease is not None
        assert command._lease.wait_lost(PATIENCE)

    pre_migrate.connect(lose)
    try:
        with pytest.raises(CommandError) as caught:
            call_command(command, ttl=6.0, verbosity=0)
    finally:
        pre_migrate.disconnect(lose)
        other.close()

    assert caught.value.returncode == 79
    assert execute("SELECT to_regclass('shop_sale')") == [(None,)]
    with pytest.raises(lockkit.LockLost):
        command.migration_progress_callback("unapply_start")


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, {-2, 1, 130}), (signal.SIGTERM, {143})])
def test_interrupted_migration_leaves_no_lock(empty: PostgresServer, signum: int, status: set[int]) -> None:
    """Nor a statement that the server goes on with, while the next process migrates."""
    call_command("migrate", "shop", "sales", verbosity=0)
    command = ("-W", "ignore", "manage.py", "migrate_locked")
    with transaction.atomic():
        execute("INSERT INTO shop_sale (seat, customer, token) VALUES ('12A', 'Ada', 1)")  # what the index waits for
        with python_group(Path(os.devnull), *command, cwd=SITE, **site_environment(empty)) as process:
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CREATE INDEX%' AND state = 'active'"
            until(lambda: empty.execute(waiting) == "1", LIMIT)
            process.send_signal(signum)
            assert process.wait(LIMIT) in status
        until(lambda: empty.execute(waiting) == "0", LIMIT)
        assert empty.execute("SELECT count(*) FROM lockkit_locks WHERE owner IS NOT NULL") == "0"


# -- the usual ways -------------------------------------------------------------------------------------------------


def test_cache_add_is_deleted_by_the_one_before() -> None:
    """``cache.add`` as a lock: A's entry expires, B adds its own, and A's delete lets C in while B works."""
    cache = LocMemCache("usual", {})
    assert cache.add("lock", "A", timeout=0.05)
    until(lambda: cache.add("lock", "B", timeout=LIMIT), LIMIT)
    cache.delete("lock")  # A's

    assert cache.add("lock", "C", timeout=LIMIT)


def test_select_for_update_locks_no_row_that_is_not_there(table: None) -> None:
    """Two transactions that find nothing both insert."""
    del table
    with transaction.atomic(), transaction.atomic("other"):
        for using in ("default", "other"):
            execute("SET LOCAL lock_timeout = '5s'", using)
            assert execute("SELECT x FROM made WHERE x = 12 FOR UPDATE", using) == []
        for using in ("default", "other"):
            execute("INSERT INTO made VALUES (12)", using)

    assert execute("SELECT count(*) FROM made WHERE x = 12") == [(2,)]


# -- the example ----------------------------------------------------------------------------------------------------


def test_example_runs(tmp_path: Path) -> None:
    """One command, on SQLite."""
    demo = ("-W", "ignore", SITE / "demo.py")
    out = printed(*demo, cwd=tmp_path, without=["DATABASE_URL", "SHOP_LOCKS"], SHOP_DATA=str(tmp_path))

    assert out.count("12A is sold") == 2


def test_example_s_view_sells_a_seat_once(empty: PostgresServer) -> None:
    """Requests at the same time, each in the transaction of ATOMIC_REQUESTS, which ends after the view."""
    del empty
    call_command("migrate", verbosity=0)
    together = threading.Barrier(8)

    def buy(customer: int) -> int:
        together.wait(PATIENCE)
        try:
            return int(Client().post("/seats/12A/buy", {"customer": customer}).status_code)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(buy, range(8))) == [200] + [409] * 7
    assert execute("SELECT count(*) FROM shop_sale") == [(1,)]


def test_example_s_own_tests_pass(tmp_path: Path) -> None:
    """As its developers run them, and its command under a lock with the exit statuses of lockkit run."""
    manage = partial(run_python, "-W", "ignore", "manage.py", cwd=SITE, SHOP_DATA=str(tmp_path))
    tests = manage("test")
    assert tests.returncode == 0, tests.stderr
    assert "Ran 1 test" in tests.stderr
    ran = manage("locked", "NAME", "--timeout", "60", "--", "sh", "-c", "echo $LOCKKIT_NAME; exit 3")
    assert (ran.returncode, ran.stdout) == (3, "NAME\n"), ran.stderr
