"""A middleware that answers errors of locks."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.utils.deprecation import MiddlewareMixin

from holdfast import HoldfastError
from holdfast.integrations.problem import problem_of

__all__ = ["LockErrors"]


class LockErrors(MiddlewareMixin):
    """Answers views that raise: 423 for ``LockTimeout``, 503 for ``BackendUnavailable`` and
    ``LockLost``, 409 for ``StaleFence``, all with ``Retry-After``. The answer names neither the
    lock, nor its holder, nor the store. Transactions of the view have been rolled back by then.
    """

    def process_exception(self, _request: HttpRequest, error: Exception) -> HttpResponse | None:
        """The answer for an error of a lock; ``None`` for all others."""
        told = problem_of(error) if isinstance(error, HoldfastError) else None
        if told is None:
            return None
        return HttpResponse(told.body, status=told.status, headers=told.headers)
