"""What the SQL stores share: connections, pools, and sessions that hold locks.

Reading order: ``connection`` (the interface: send, flush, collect), ``blocking`` and ``aio`` (pools
of connections for threads or for an event loop), ``session`` (connections that hold locks, and
their registry), ``session_blocking`` and ``session_aio`` (requests on sessions), ``advisory`` (the
renewal of sessions).
"""
