"""What is imported when, and why: the one place that explains it.

A command such as ``holdfast run`` lives for milliseconds, so start-up counts. Four rules:

- ``import holdfast`` loads the errors only. ``_HOMES`` in ``holdfast/__init__.py`` maps every other
  public name to its module, which is imported when the name is first used. So a blocking program
  never loads asyncio.
- A primitive other than ``lock()`` is imported when a client first makes one: ``later`` below.
- A module that every program loads, and that defines named tuples or typed dictionaries, does
  *without* ``from __future__ import annotations``: with it, each annotation is a text that is
  compiled when the class is made.
- Modules that a client needs only in some situations are imported inside functions, and are listed
  in ``LATER`` (of ``holdfast.locks``, and of the store's module). ``connect()`` imports them all at
  once (``load`` below): an interrupt in the middle of an import may leave the interpreter's import
  lock taken, and then the next import of another thread, such as the renewer's, hangs. The command
  line does not call ``connect()``, and so skips them.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

__all__ = ["later", "load"]


class _LazyClass:
    """A class attribute that is imported when it is read."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __get__(self, instance: object, owner: type) -> Any:
        return getattr(import_module(self._module), self._name)


def later(module: str, name: str) -> Any:
    """The class of a primitive, as an attribute of a client; imported when it is first used."""
    return _LazyClass(module, name)


def load(modules: Iterable[str], store_module: str) -> None:
    """Imports these modules, and those that the store's module names in ``LATER``."""
    for module in (*modules, *getattr(import_module(store_module), "LATER", ())):
        import_module(module)
