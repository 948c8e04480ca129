"""Texts that go on: prefix reuse between requests, saved and restored."""

from onward.sessions.session import Session

__all__ = ["Session"]
