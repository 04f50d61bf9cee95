"""The Django app: system checks and management commands."""

from __future__ import annotations

from django.apps import AppConfig

__all__ = ["LockkitConfig"]


class LockkitConfig(AppConfig):
    """What ``"lockkit.integrations.django"`` in ``INSTALLED_APPS`` installs."""

    name = "lockkit.integrations.django"
    label = "lockkit"
    verbose_name = "lockkit"

    def ready(self) -> None:
        """Register the system checks."""
        from lockkit.integrations.django import checks  # noqa: PLC0415 - not before the apps are there

        checks.register()
