"""Which failed tests may be run again, and which never: see `verdict.plugin`."""
