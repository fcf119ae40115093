"""Exceptions for problems in the user's data."""

from common.errors import UsageError


class DataError(UsageError):
    """A file is wrong. The message has one line: file, line or byte, problem, and what to do."""


class NothingFitsError(DataError):
    """A split has no sample of the requested length."""
