"""The worlds that the core runs in: blocking threads and asyncio. The simulator is a third."""
