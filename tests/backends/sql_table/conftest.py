"""Fixtures for the tests of the lock table."""
