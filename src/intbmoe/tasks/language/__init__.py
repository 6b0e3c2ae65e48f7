"""Language modelling: where text comes from (one module per source), how it is made ready, how it is read."""

from intbmoe.tasks.language.task import LanguageTask

__all__ = ["LanguageTask"]
