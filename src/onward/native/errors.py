"""The errors of this package, gathered here so that their bases are named in one place."""

from onward.errors import OnwardError


class NativeUnavailableError(OnwardError, ValueError):
    """No native library serves the request: none was built, or the machine lacks the one asked for."""


class NativeError(OnwardError):
    """A kernel refused its arguments, or could not allocate memory."""
