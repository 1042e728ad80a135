"""The one copy of the rules. Nothing in here imports asyncio, threading, time or socket."""
