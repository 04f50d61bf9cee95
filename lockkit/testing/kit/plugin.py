"""
The entry point of `lockkit.testing.kit`: its fixtures in a module of another name.

pytest refuses a module that it finds under two names. So an application can also write
``pytest_plugins = ["lockkit.testing.kit"]`` where the entry point is installed.
"""

from lockkit.testing.kit import lockkit_aio_client, lockkit_client, lockkit_once, lockkit_time

__all__ = ["lockkit_aio_client", "lockkit_client", "lockkit_once", "lockkit_time"]
