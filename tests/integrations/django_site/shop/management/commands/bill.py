"""A command of which one runs at a time."""

from __future__ import annotations

import os
import time
from typing import Any

from django.core.management.base import CommandParser

from holdfast.integrations.django import LockedCommand
from integrations.journal import Journal

journal = Journal(os.environ.get("JOURNAL", "/nowhere/journal"))


class Command(LockedCommand):
    lock = "bill:{month}"

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("month")
        parser.add_argument("--skip", action="store_true")
        parser.add_argument("--hold", action="store_true")

    def execute(self, *args: Any, **options: Any) -> str | None:
        type(self).busy = "skip" if options["skip"] else "fail"
        return super().execute(*args, **options)

    def handle(self, *args: Any, **options: Any) -> None:
        self.lease.check()
        journal.write("bill", token=self.lease.token)
        while options["hold"] and not journal.read("finish"):
            time.sleep(0.02)
