"""Fixtures for the tests of the lock table."""

from tests.backends.sql_table.support import connect  # noqa: F401 - a fixture
