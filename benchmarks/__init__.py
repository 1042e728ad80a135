"""How fast Holdfast is, against the least that a store can be asked for. Run ``make bench``."""
