"""Exceptions for problems in the user's data."""

from common.errors import UsageError


class DataError(UsageError):
    """The data cannot be used. The message names file, place, problem and remedy in one line."""


class NothingFitsError(DataError):
    """No sample of the requested length can be made from a split."""
