"""The only code that knows threads from event loops: runtimes, drivers, shared protocols.

``runtime_blocking`` and ``runtime_aio`` are the two worlds that the core runs in (the simulator is
a third); ``wakeups`` wakes waiters; ``http``, ``long_poll`` and ``resp`` are protocols that several
stores speak.
"""
