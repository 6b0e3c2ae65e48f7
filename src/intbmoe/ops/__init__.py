"""Numerical operations with several implementations: ``<op>/naive.py`` is the specification, the others are faster."""
