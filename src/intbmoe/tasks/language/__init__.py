"""Language modelling: where text comes from (one module per source), how it is prepared, and how it is read."""

from intbmoe.tasks.language.task import LanguageTask

__all__ = ["LanguageTask"]
