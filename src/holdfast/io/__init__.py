"""The only code that knows threads from event loops: runtimes, drivers, shared protocols.

``runtime_blocking`` and ``runtime_aio`` are the two runtimes of the core (the simulator is a
third). ``threads`` has the threads of the process, ``lifetime`` forks and exit, ``wakeups`` the
wake-up of waiters, ``limits`` connection limits, ``sockets`` name resolution and connecting.
``http``, ``long_poll`` and ``resp`` are protocols that several stores use.
"""
