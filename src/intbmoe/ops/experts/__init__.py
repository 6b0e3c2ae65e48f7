"""Experts of a sparse method, from tokens to weighted sums.

``naive`` is the specification, ``native`` one call of the compiled library. The other backends sort rows, multiply and
combine them in operations of their own (``parts/experts.py``).
"""
