"""Plain item sequences: each user's items in time order, windows to train on, floors to beat."""

from intbmoe.tasks.sequences.task import SequencesTask

__all__ = ["SequencesTask"]
