"""The cases of the benchmarks: ``holdfast bench URL`` runs them on a user's own store.

``benchmarks/`` of the repository runs the same cases with peers, limits and servers of its own,
so that both measure alike. Nothing else in the package imports this.
"""
