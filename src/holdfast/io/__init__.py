"""The only code that knows threads from event loops: runtimes, drivers, shared protocols.

``runtime_blocking`` and ``runtime_aio`` are the two runtimes of the core (the simulator is a
third). ``connection`` is a protocol on a descriptor, and how one is opened; ``blocking`` and
``aio`` are the two drivers: pools, deadlines, forks, interrupts. ``wakeups`` wakes waiters,
``threads`` has the threads of the process, ``lifetime`` forks and exit, ``limits`` connection
limits, ``sockets`` name resolution. ``resp``, ``http`` and ``http2`` are protocols.
"""
