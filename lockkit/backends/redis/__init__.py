"""Locks on Redis or Valkey: one node, Sentinel or Cluster."""
