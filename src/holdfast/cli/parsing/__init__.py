"""The command line itself: its options and its parsers; the small parser starts quickly."""
