"""Code of users of Django and Alembic, for the type checkers only."""

from __future__ import annotations

from typing import Any, assert_type

from django.db import transaction
from django.http import HttpRequest, HttpResponse

from holdfast import Lease, Locks, Outcome
from holdfast.integrations.alembic import locked
from holdfast.integrations.django import LockedCommand, guard, locks, name_of
from integrations.django_site.shop.models import Order


def pay(request: HttpRequest, pk: int) -> HttpResponse:
    order = Order.objects.get(pk=pk)
    with locks.lock(order, timeout=2) as lease, transaction.atomic():
        assert_type(lease, Lease)
        guard(lease)
    with locks.lock(name_of(Order, pk), until="commit", using="default") as lease:
        assert_type(lease.token, int)
    return HttpResponse()


@locks.lock("nightly")
def report(day: str) -> int:
    return len(day)


assert_type(report("monday"), int)
assert_type(locks.client, Locks)
assert_type(locks.once("job").run(lambda: 1), Outcome)


class Command(LockedCommand):
    lock = "import:{feed}"
    lock_timeout = None
    busy = "skip"

    def handle(self, *args: Any, **options: Any) -> None:
        assert_type(self.lease, Lease)


with locked("redis://cache", name="migrate", timeout=5) as held:
    assert_type(held, Lease | None)
