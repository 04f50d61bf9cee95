"""Optimistic updates for ZooKeeper."""
