"""Locks on several independent Redis or Valkey nodes: Redlock."""
