"""Experts of a sparse method, from tokens to weighted sums.

``naive`` is the specification, ``native`` one call of the compiled library. The other backends sort, multiply and
combine rows in separate operations (``parts/experts.py``).
"""
