"""Locks between the processes of one machine, without a server."""
