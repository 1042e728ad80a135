"""The models of the shop."""

from __future__ import annotations

import uuid

from django.db import models


class Order(models.Model):
    total = models.IntegerField(default=0)  # type: ignore[var-annotated]

    class Meta:
        app_label = "shop"


class RushOrder(Order):
    """The same rows by another class."""

    class Meta:
        app_label = "shop"
        proxy = True


class Seed(models.Model):
    """Written by a migration that must run once."""

    class Meta:
        app_label = "shop"


class Parcel(models.Model):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)  # type: ignore[var-annotated]

    class Meta:
        app_label = "shop"
