"""Locks inside one process."""
