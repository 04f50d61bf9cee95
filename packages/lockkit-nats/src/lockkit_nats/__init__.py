"""Locks in a NATS JetStream key-value bucket, for lockkit: ``nats://host:4222/bucket``."""

from lockkit_nats.backend import NatsBackend

__all__ = ["NatsBackend"]
