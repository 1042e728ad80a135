"""The suite that every store must pass, and what it is made of; public, for your own stores.

``contract`` holds the rules of a backend, ``conformance`` those that a user sees through both
clients. A ``Harness`` starts the store and breaks it. See the guide "Test your store".
"""

from __future__ import annotations

from holdfast.testing.guarantees import GUARANTEES
from holdfast.testing.harness import Harness, Knob, KnobMissing
from holdfast.testing.rules import Case, Catalogue, Flavour, Rule

__all__ = ["GUARANTEES", "Case", "Catalogue", "Flavour", "Harness", "Knob", "KnobMissing", "Rule"]
