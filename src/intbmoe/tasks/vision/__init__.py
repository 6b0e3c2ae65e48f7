"""Where images come from and what is done to them: one file a source, one a kind of change."""
