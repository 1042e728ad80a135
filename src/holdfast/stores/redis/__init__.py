"""``redis://`` and its relatives: locks on Redis and Valkey, admitted by scripts on the server.

What is stored (the spelling of keys, fields and channels is a format, and must not change)::

    namespace:{name}          one hash per lock name; its fields are listed in lua/state.lua
      x, xe, xl               the exclusive holder: owner, end, label
      h:OWNER, s:NUMBER       shared and slot holders, and the owner of each slot
      w:OWNER, l:NUMBER       the queue: an entry per waiter, and the waiter of each queue number
      t                       the last token; it outlives the holders
      rv, rt, ra, re          the record
    namespace:loss            with loss_protection: the last known server, and when grants resume
    namespace:wake:CLIENT     the channel on which the waiters of one client are woken
    name                      with interop=redis-py: the key of redis-py's Lock

Read in this order: ``lua/state.lua`` and ``lua/attempt.lua`` (the rules), ``scripts`` (how they are
put together), ``backend`` (the requests), ``replies``, ``inspect``; then ``url``, ``routes`` (which
node), ``connection`` (login and subscriptions, over ``io.resp`` and the drivers of ``io``).
"""

from __future__ import annotations

from holdfast.core.contract import Settings, Store
from holdfast.url import Url

__all__ = ["open_store"]


def open_store(url: Url, settings: Settings) -> Store:
    """Opens the store of a URL; nothing touches the network yet."""
    from holdfast.stores.redis.backend import open_store as open_redis

    return open_redis(url, settings)
