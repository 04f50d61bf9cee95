"""``manage.py keep``: hold a lock until the command is ended."""

from __future__ import annotations

import signal
import sys
import time

from django.core.management.base import BaseCommand

from lockkit.integrations.django import client


class Command(BaseCommand):  # type: ignore[misc] # Django has no types
    """As a job of the site that runs for long."""

    def handle(self, **_: object) -> None:
        """Hold it."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        with client().lock("django"):
            self.stdout.write("held django")
            self.stdout.flush()
            time.sleep(3600)
