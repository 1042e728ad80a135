"""``python -m holdfast`` is the ``holdfast`` command."""

from holdfast.cli import program

program()
