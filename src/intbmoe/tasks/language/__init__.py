"""Text as tokens: where it comes from (one module a source), how it is made ready once, and how the loop reads it."""
