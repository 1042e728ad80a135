"""``Idempotency-Key``: a request that is sent twice is done once, and both get the same response.

    app.add_middleware(AsgiIdempotency, caller=...)      # Starlette, FastAPI; asgi.lifespan(url)
    app = WsgiIdempotency(app, locks, caller=...)        # Flask, Django

A key belongs to its caller, method and path. The response is recorded before it is sent. If the
process dies in the middle, the next request with the key runs the handler again, with a higher
fence: ``fencing.http.fence_of(request)`` is for the guard in the handler's transaction.
"""

from __future__ import annotations

from holdfast.integrations.idempotency.asgi import AsgiIdempotency
from holdfast.integrations.idempotency.wsgi import WsgiIdempotency

__all__ = ["AsgiIdempotency", "WsgiIdempotency"]
