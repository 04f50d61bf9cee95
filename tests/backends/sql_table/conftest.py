"""Fixtures for the tests of the lock table."""

from tests.backends.sql_table.support import connect

__all__ = ["connect"]
