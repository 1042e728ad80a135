"""What the SQL stores share: connections, pools, and sessions that hold locks.

Reading order: ``connection`` (what a connection has beyond ``io.connection``; opening; the pool),
``session`` (connections that hold locks, their registry, and requests on them), ``advisory`` (the
rules of both advisory stores), ``purge`` (when idle names are deleted).
"""
