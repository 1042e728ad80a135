"""The Django app: its commands and system checks."""

from __future__ import annotations

from django.apps import AppConfig

__all__ = ["HoldfastConfig"]


class HoldfastConfig(AppConfig):
    """The app ``holdfast``. It has no models and no migrations."""

    name = "holdfast.integrations.django"
    label = "holdfast"
    verbose_name = "Holdfast"

    def ready(self) -> None:
        """Registers the system checks."""
        from holdfast.integrations.django.checks import register

        register()
