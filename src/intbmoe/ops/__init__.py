"""Numerics that exist more than once: ``<op>/naive.py`` is the specification, its siblings are faster."""
