"""The rules of Holdfast, written once. Nothing here imports asyncio, threading, time or socket.

Reading order: ``contract`` (what a store must do), ``acquire``, ``engine``, ``hold``, ``renewer``,
``watcher``, ``extend``, ``local_queue``. ``admit`` and ``ordered`` are rules that stores share.
"""
