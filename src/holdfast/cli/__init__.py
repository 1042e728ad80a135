"""The ``holdfast`` command. One file per verb; ``main`` picks one and imports only that."""

from holdfast.cli.main import main, program

__all__ = ["main", "program"]
