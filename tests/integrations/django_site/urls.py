"""Views that change the total of an order, with and without locks."""

from __future__ import annotations

import os
import time
from typing import Any

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path

from holdfast.integrations.django import guard, locks, name_of
from integrations.django_site.shop.models import Order
from integrations.journal import Journal

journal = Journal(os.environ.get("JOURNAL", "/nowhere/journal"))


def root(_: HttpRequest) -> JsonResponse:
    return JsonResponse({"pid": os.getpid()})


def add_one(order: Order) -> JsonResponse:
    """Not atomic: two at once lose one."""
    order.refresh_from_db()
    time.sleep(0.01)
    order.total += 1
    order.save()
    return JsonResponse({"total": order.total})


def unlocked(_: HttpRequest, pk: int) -> JsonResponse:
    with transaction.atomic():
        return add_one(Order(pk=pk))


def add(_: HttpRequest, pk: int) -> JsonResponse:
    order = Order.objects.get(pk=pk)
    with locks.lock(order) as lease, transaction.atomic():
        guard(lease)
        return add_one(order)


def early(_: HttpRequest, pk: int) -> JsonResponse:
    """What people write: the lock is released before the transaction commits."""
    with transaction.atomic():
        with locks.lock(Order.objects.get(pk=pk)):
            answer = add_one(Order(pk=pk))
        time.sleep(0.02)  # other work of the request
        return answer


def until_commit(_: HttpRequest, pk: int) -> JsonResponse:
    with transaction.atomic():
        with locks.lock(name_of(Order, pk), until="commit"):
            answer = add_one(Order(pk=pk))
        time.sleep(0.02)
        return answer


def hold(_: HttpRequest, pk: int) -> JsonResponse:
    """Holds the lock until the test says otherwise, then writes."""
    with locks.lock(Order.objects.get(pk=pk)) as lease:
        journal.write("hold", token=lease.token)
        while not journal.read("finish"):
            time.sleep(0.02)
        with transaction.atomic():
            guard(lease)
            answer = add_one(Order(pk=pk))
        journal.write("written", token=lease.token)
    return answer


def busy(_: HttpRequest, pk: int) -> JsonResponse:
    with locks.lock(Order.objects.get(pk=pk), timeout=0):
        return JsonResponse({})


async def in_event_loop(_: HttpRequest) -> JsonResponse:
    """A lock would block the loop: Django's own error says so."""
    try:
        with locks.lock("loop"):
            return JsonResponse({"error": ""})
    except Exception as error:
        return JsonResponse({"error": type(error).__name__})


VIEWS: dict[str, Any] = {
    "unlocked": unlocked,
    "add": add,
    "early": early,
    "commit": until_commit,
    "hold": hold,
    "busy": busy,
}
urlpatterns = [
    path("", root),
    path("loop", in_event_loop),
    *(path(f"orders/<int:pk>/{word}", view) for word, view in VIEWS.items()),
]
