"""
Locks for Django 4.2 and later. Needs ``pip install 'lockkit[django]'``.

::

    INSTALLED_APPS = [..., "lockkit.integrations.django"]
    LOCKKIT = {"default": "redis://localhost:6379/0"}

    from lockkit.integrations.django import client

    with client().lock("seat:12A", until_commit=True) as lease:
        ...

- `client` and `aio_client`: clients by the aliases of ``settings.LOCKKIT``.
- `from_connection`: a client whose locks are rows of a Django database.
- ``manage.py locked NAME -- command``: a command under a lock.
- ``manage.py migrate_locked``: one process at a time migrates.
"""

from lockkit.integrations.django.clients import aio_client, client, from_connection
from lockkit.integrations.django.transactions import DjangoClient

__all__ = ["DjangoClient", "aio_client", "client", "from_connection"]
