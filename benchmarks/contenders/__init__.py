"""One file per store: limits, the bare client library, peers, and Holdfast."""
