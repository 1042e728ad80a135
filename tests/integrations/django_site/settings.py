"""Settings of the project that the tests of the Django integration run."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

SECRET_KEY = "for tests"
DEBUG = os.environ.get("DEBUG", "1") == "1"
ALLOWED_HOSTS = ["127.0.0.1", "testserver"]
ROOT_URLCONF = "integrations.django_site.urls"
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "holdfast.integrations.django",
    "integrations.django_site.shop",
]
MIDDLEWARE = ["holdfast.integrations.django.LockErrors"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"


def database(address: str) -> dict[str, Any]:
    """The settings of ``sqlite:///PATH`` or ``postgresql://USER@HOST:PORT/NAME``."""
    parts = urlsplit(address)
    if parts.scheme == "sqlite":
        engine = {"ENGINE": "django.db.backends.sqlite3", "NAME": parts.path}
        return {**engine, "OPTIONS": {"timeout": 60, "transaction_mode": "IMMEDIATE"}}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path[1:],
        "USER": parts.username,
        "HOST": parts.hostname,
        "PORT": parts.port,
    }


DATABASES = {"default": database(os.environ.get("DATABASE", "sqlite:////nowhere/db"))}
HOLDFAST: dict[str, Any] = {"TTL": 3, "TIMEOUT": 60, "PATIENCE": 10}
if "NAMESPACE" in os.environ:
    HOLDFAST |= {"NAMESPACE": os.environ["NAMESPACE"]}
