"""Guards and optimistic updates: data in Redis, etcd, ZooKeeper and SQL databases that no stale holder overwrites."""
