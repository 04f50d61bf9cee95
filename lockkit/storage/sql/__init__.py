"""Guards, optimistic updates and `lock_in` for SQL databases."""

LOCKS = "lockkit_tx"
"""Default table of `lockkit.sql.lock_in`."""

FENCES = "lockkit_fences"
"""Default table of `lockkit.fencing.SqlGuard`."""
