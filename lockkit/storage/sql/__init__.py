"""Guards, optimistic updates and `lock_in` for SQL databases."""
