"""Locks that are open sessions of a SQL database: ``mode=row`` and ``mode=advisory``."""
