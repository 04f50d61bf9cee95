"""Locks in a table of a SQL database."""
