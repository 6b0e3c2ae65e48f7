"""One predictor a task: what a request is, and how the model answers a batch of them."""
