"""The exceptions of this package: something about the user's data is wrong."""

from common.errors import UsageError


class DataError(UsageError):
    """Says which file (and line or byte), what is wrong with it, and what to do, in one line."""


class NothingFitsError(DataError):
    """Says that a split has no sample of the length asked for."""
