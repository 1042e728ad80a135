"""The only network code: blocking and asyncio variants side by side, foreign errors mapped."""
