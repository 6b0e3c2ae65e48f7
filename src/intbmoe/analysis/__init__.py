"""What a model costs, where its tokens go and what its experts do: computed first, then drawn from the saved data."""
