"""What the sequences task reads: items of users in time order, windows to train on, floors to beat."""
