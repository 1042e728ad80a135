"""An index that PostgreSQL makes outside of a transaction: it waits for all open snapshots."""

from __future__ import annotations

from typing import Any

from django.db import migrations


def index(_apps: Any, editor: Any) -> None:
    concurrently = "CONCURRENTLY" if editor.connection.vendor == "postgresql" else ""
    editor.execute(f"CREATE INDEX {concurrently} by_total ON shop_order (total)")


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("shop", "0002_seed")]
    operations = [migrations.RunPython(index, migrations.RunPython.noop)]
