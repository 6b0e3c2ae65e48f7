"""What can end an export."""


class ExportError(RuntimeError):
    """A run cannot be exported, or what was made of it does not do what the run's model does; nothing is written."""
