"""The ``holdfast`` command. One file per verb; ``main`` picks one and imports only that."""

from holdfast.cli.main import main

__all__ = ["main"]
