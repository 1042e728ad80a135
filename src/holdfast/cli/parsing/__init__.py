"""The command line itself: its options and its parsers, a small one that starts quickly."""
