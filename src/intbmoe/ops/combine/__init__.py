"""The way back from rows to tokens: each token's weighted sum over its rows."""
