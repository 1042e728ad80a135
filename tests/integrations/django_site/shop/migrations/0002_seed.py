"""Writes a row that must be written once, and takes its time."""

from __future__ import annotations

import os
import time
from typing import Any

from django.db import migrations

from integrations.journal import Journal


def seed(apps: Any, _editor: Any) -> None:
    apps.get_model("shop", "Seed").objects.create()
    time.sleep(float(os.environ.get("SLOW_SECONDS", "0")))
    if "HOLD" in os.environ:
        journal = Journal(os.environ["JOURNAL"])
        journal.write("seeds")
        while not journal.read("finish"):
            time.sleep(0.02)


class Migration(migrations.Migration):
    atomic = "WITHOUT_TRANSACTION" not in os.environ
    dependencies = [("shop", "0001_initial")]
    operations = [migrations.RunPython(seed, migrations.RunPython.noop)]
