"""What is built on locks, once for the sync and the async API: several locks at once, election, once-only work."""
