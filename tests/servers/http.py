"""One HTTP request with the standard library, for servers that speak it."""

import json
import ssl
import urllib.request
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 10.0
"""Far more than an answer takes, also on a machine that stumbles."""
LOOK_SECONDS = 2.0
"""For who asks again: a server that is just starting may never answer what came too early."""


def ask(
    url: str,
    body: Any = None,
    *,
    method: str | None = None,
    trust: Path | None = None,
    seconds: float = ANSWER_SECONDS,
) -> Any:
    """Sends `body` as JSON, if there is one, and gives the JSON answer (or its text)."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method)
    context = ssl.create_default_context(cafile=trust) if trust else None
    # A proxy of the environment must not see what is meant for loopback.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if context:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    with urllib.request.build_opener(*handlers).open(request, timeout=seconds) as reply:
        text = reply.read().decode()
    try:
        return json.loads(text)
    except ValueError:
        return text
