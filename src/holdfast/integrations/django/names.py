"""Names of locks by model and primary key: ``shop.order:42``."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from django.db.models import Model

__all__ = ["name_of"]


def name_of(what: Model | type[Model] | str, pk: Any = None) -> str:
    """The name of the lock of an instance, or of a model and a primary key: its app label, model
    and key. A text is returned as it is.

    Instances that Django calls equal have the same name: a proxy model has that of its concrete
    model. The database is not part of it, since a replica has the same row. Raises ``ValueError``
    for an instance that is not saved: no other process can have the same name for it.
    """
    if isinstance(what, str):
        return what
    if isinstance(what, Model):
        if what.pk is None or what._state.adding:
            raise ValueError(
                f"this {type(what).__name__} is not saved, so no other process can lock it: save "
                "it first, or lock by a name of your own, or name_of(Model, pk)"
            )
        pk = what.pk
    elif not (isinstance(what, type) and issubclass(what, Model)):
        raise TypeError(f"a lock is named by text or by a model instance, not {what!r:.60}")
    elif pk is None:
        raise ValueError(f"name_of({what.__name__}, pk) needs a primary key: which row is meant?")
    meta = what._meta.concrete_model._meta  # type: ignore[union-attr]
    return f"{meta.label_lower}:{_text(meta.pk, pk)}"


def _text(field: Any, pk: Any) -> str:
    """The key as text, the same for ``42`` and ``"42"``, and for all spellings of a UUID."""
    if isinstance(pk, tuple | list):  # a composite key: no two keys have the same text
        parts = zip(field.fields, pk, strict=True)
        return ",".join(quote(str(part.to_python(value)), safe="") for part, value in parts)
    return str(field.to_python(pk))
