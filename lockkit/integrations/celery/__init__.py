"""
Celery tasks that run under a lock, and a scheduler for several beats. Needs ``pip install 'lockkit[celery]'``.

Both use ``app.conf.lockkit_url``, or the configuration of ``lockkit.connect()``; each process has its own client.
"""

from lockkit.integrations.celery.beat import LeaderOnly, LeaderScheduler
from lockkit.integrations.celery.task import LockedTask

__all__ = ["LeaderOnly", "LeaderScheduler", "LockedTask"]
