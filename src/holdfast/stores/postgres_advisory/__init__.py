"""``postgresql://…?mode=advisory``: locks that end with their connection."""
