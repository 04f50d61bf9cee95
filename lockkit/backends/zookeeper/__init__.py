"""Locks on ZooKeeper."""
