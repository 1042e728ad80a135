"""``memcached://host:11211``: locks on one memcached server that was started with ``-M -F``.

What is stored::

    holdfast.NAMESPACE.NAME    one item per lock name; both words are SHA-256 digests
      [version, name, token, holds, queue]    as JSON: ``item`` has the entries

Every request reads an item with its version (``gets``), changes it by the rules of
``holdfast.core.queue``, and writes it back if it has not changed (``add``, ``cas``). Times are the
server's, in whole seconds. Read in this order: ``item`` (what is stored), ``backend`` (the
requests), ``connection`` (the protocol, and what the server must be like).
"""

from holdfast.core.contract import Settings
from holdfast.url import Url
from holdfast_memcached.backend import LONGEST_SECONDS, MemcachedStore
from holdfast_memcached.connection import MemcachedEndpoint

PORT, QUARANTINE_SECONDS = 11211, 64.0


def open_store(url: Url, settings: Settings) -> MemcachedStore:
    """Opens the store of a URL; nothing touches the network yet. Raises ``ValueError`` for a URL
    that it does not understand."""
    url.refuse_unknown("quarantine")
    if len(url.hosts) != 1 or url.username or url.password or url.path not in ("", "/"):
        raise ValueError("memcached:// has one host, no login and no path: memcached://host:11211")
    quarantine = url.number("quarantine", QUARANTINE_SECONDS)
    if quarantine and not 5 <= quarantine <= LONGEST_SECONDS:
        raise ValueError(f"quarantine={quarantine:g}: 0 for none, or from 5 s to a day")
    host, port = url.hosts[0]
    endpoint = MemcachedEndpoint(host, port or PORT, str(url), settings.request_seconds)
    return MemcachedStore(endpoint, settings, quarantine)
