"""Guards and optimistic updates for Redis and Valkey."""
