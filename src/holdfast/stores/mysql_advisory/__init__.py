"""``mysql://…?mode=advisory``: named locks (``GET_LOCK``), which end with their connection."""
