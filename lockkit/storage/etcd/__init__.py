"""Guards and optimistic updates for etcd."""
