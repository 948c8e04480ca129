"""Sessions: a text's cache, reused from request to request, saved and restored."""

from onward.sessions.session import Session

__all__ = ["Session"]
