"""Exceptions for problems in the user's data."""

from common.errors import UsageError


class DataError(UsageError):
    """The data cannot be used. The message says why in one line, and names the file if possible."""


class NothingFitsError(DataError):
    """A split has no sample of the requested length."""
