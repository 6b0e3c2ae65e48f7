"""Compute first, draw second: what a model costs, and later where its tokens go and what its experts do."""
