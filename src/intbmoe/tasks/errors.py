"""The error raised when data is not as it should be."""


class DataError(ValueError):
    """Data that is missing or malformed; the message names the file and says what was expected."""
