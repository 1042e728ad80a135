"""System checks: what is wrong with the setting ``HOLDFAST``, told by ``manage.py``."""

from __future__ import annotations

import os
import sys
from typing import Any

from django.conf import settings as project
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from holdfast import Guarantee, GuaranteeNotMet, HoldfastError
from holdfast.integrations.django import settings

__all__ = ["check_settings", "check_store", "register"]

PATIENCE_SECONDS = 3
FOUND = "holdfast.W003"
"""Of what a check of the store has found: news for a deployment, not for each ``migrate``."""


def register() -> None:
    """Registers the checks: the settings always; the store, which is contacted, for ``check
    --deploy`` and for a database (``check --database``, ``migrate``)."""
    checks.register(check_settings, "holdfast")
    checks.register(check_store, "holdfast", deploy=True)
    checks.register(check_with_databases, checks.Tags.database)


def check_settings(**_: Any) -> list[checks.CheckMessage]:
    """What can be known without contacting the store."""
    try:
        unknown = settings.unknown_keys()
    except ImproperlyConfigured as error:
        return [checks.Error(str(error), id="holdfast.E002")]
    if unknown:
        return [checks.Error(line, id="holdfast.E002") for line in unknown]
    if not settings.given().get("URL") and not _url_of_environment():
        return [
            checks.Error(
                "there is no store of locks",
                hint='HOLDFAST = {"URL": "redis://host:6379/0"}, or the variable HOLDFAST_URL',
                id="holdfast.E001",
            )
        ]
    try:
        with settings.client() as client:
            return _check_reach(client.guarantees)
    except (ImproperlyConfigured, HoldfastError) as error:
        return [checks.Error(str(error), id="holdfast.E003")]


def _url_of_environment() -> bool:
    return any(os.environ.get(word) for word in ("HOLDFAST_URL", "HOLDFAST_URL_FILE"))


def _check_reach(guarantees: frozenset[Guarantee]) -> list[checks.CheckMessage]:
    """Warns of a store that only this machine sees, where DEBUG is off. Django's test runner turns
    it off, too."""
    testing = sys.argv[1:2] == ["test"]
    if project.DEBUG or testing or Guarantee.CROSS_HOST in guarantees:
        return []
    return [
        checks.Warning(
            "the store of locks is on this machine, and DEBUG is off: processes on other hosts do "
            "not see these locks",
            hint='HOLDFAST["URL"] names a server that all hosts share; silence it on a single host',
            id="holdfast.W001",
        )
    ]


def check_store(**_: Any) -> list[checks.CheckMessage]:
    """Contacts the store: whether it is reached, and what its guarantees rest on."""
    if [message for message in check_settings() if message.is_serious()]:
        return []  # told by check_settings
    try:
        with settings.client(patience=PATIENCE_SECONDS) as client:
            findings = client.check()
    except GuaranteeNotMet as error:
        return [checks.Error(str(error), id="holdfast.E003")]
    except HoldfastError as error:
        return [checks.Warning(str(error), id="holdfast.W002")]
    found = [f for f in findings if f.level != "ok"]
    return [checks.Warning(f"{f.subject}: {f.detail}", id=FOUND) for f in found]


def check_with_databases(*, databases: Any = None, **_: Any) -> list[checks.CheckMessage]:
    """Whether the store is reached, where Django contacts databases."""
    found = check_store() if databases else []
    return [message for message in found if message.id != FOUND]
