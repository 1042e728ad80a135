from __future__ import annotations

import uuid

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    operations = [
        migrations.CreateModel(
            "Order",
            [
                ("id", models.BigAutoField(primary_key=True)),
                ("total", models.IntegerField(default=0)),
            ],
        ),
        migrations.CreateModel("Seed", [("id", models.BigAutoField(primary_key=True))]),
        migrations.CreateModel(
            "Parcel", [("id", models.UUIDField(primary_key=True, default=uuid.uuid4))]
        ),
        migrations.CreateModel(
            "RushOrder", [], bases=("shop.order",), options={"proxy": True, "indexes": []}
        ),
    ]
