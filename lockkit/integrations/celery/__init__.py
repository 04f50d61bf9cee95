"""
Celery tasks that run under a lock, and a beat that may run several times. Needs ``pip install 'lockkit[celery]'``.

Both use the client of ``app.conf.lockkit_url``, or what ``lockkit.connect()`` finds; each process makes its own.
"""

from lockkit.integrations.celery.beat import LeaderOnly, LeaderScheduler
from lockkit.integrations.celery.task import LockedTask

__all__ = ["LeaderOnly", "LeaderScheduler", "LockedTask"]
