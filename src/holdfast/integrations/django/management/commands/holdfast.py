"""``manage.py holdfast ls|show|why|break|check``: the command line, on the project's own store."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from holdfast.cli import main
from holdfast.integrations.django import settings
from holdfast.integrations.django.commands import BAD_SETTING

__all__ = ["Command"]

VERBS = ("ls", "show", "why", "break", "check")


class Command(BaseCommand):
    """The verbs of ``holdfast`` that look at locks, with the settings of the project."""

    help = (
        "Looks at the locks of this project: ls [PREFIX], show NAME, why NAME, "
        "break NAME --reason …, check"
    )
    requires_system_checks = []  # noqa: RUF012 - Django's own spelling

    def add_arguments(self, parser: CommandParser) -> None:
        """A verb; what follows is read by ``holdfast VERB``."""
        parser.add_argument("verb", choices=VERBS)
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see: holdfast VERB --help")

    def handle(self, *args: Any, **options: Any) -> None:
        """Runs the verb, and exits with its code if that is not 0."""
        verb = options["verb"]
        code = main([verb, *_store(verb), *_without_django(options["arguments"])])
        if code:
            sys.exit(code)


def _store(verb: str) -> list[str]:
    """Options for the project's store. They are given to a function, where nobody sees them."""
    try:
        settings.client().close()  # never the store that the command line takes by default
        given = settings.arguments()
    except ImproperlyConfigured as error:
        raise CommandError(str(error), returncode=BAD_SETTING) from error
    keys: Any = given.get("fence_keys") or ()
    keys = [keys] if isinstance(keys, str) else list(keys)
    if keys and all(isinstance(key, str) for key in keys):  # `break` signs the fence that it prints
        os.environ.setdefault("HOLDFAST_FENCE_KEYS", " ".join(keys))
    words = ("url", "namespace", *(["epoch"] if verb == "break" else []))
    return [f"--{word}={given[word]}" for word in words if given.get(word)]


def _without_django(words: list[str]) -> list[str]:
    """The words without Django's own options, which may stand anywhere."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--settings", "--pythonpath"):
        parser.add_argument(option)
    return parser.parse_known_args(words)[1]
