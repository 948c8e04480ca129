"""API keys as digests: a server compares digests, so it never stores a key."""

import hashlib
import hmac
import re
from collections.abc import Iterable

from onward.errors import OptionError, RequestError

_PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ApiKeys(tuple[str, ...]):
    """The SHA-256 digests of API keys, each as "sha256:" and 64 hexadecimal digits. Its repr shows their number alone.

    keys: API keys, or digests of that form. Raises `OptionError`: something else; the error shows no key.
    """

    __slots__ = ()

    def __new__(cls, keys: Iterable[str] = ()) -> "ApiKeys":
        if isinstance(keys, str) or not isinstance(keys, Iterable):
            raise OptionError("api_keys", f"must be a list of strings; got one {type(keys).__name__}")
        return super().__new__(cls, [_digest_of(key) for key in keys])

    @staticmethod
    def are_digests(keys: object) -> bool:
        """Whether `keys` contains digests only."""
        return isinstance(keys, Iterable) and all(isinstance(key, str) and _DIGEST.fullmatch(key) for key in keys)

    def contains(self, key: bytes) -> bool:
        """Whether a key is one of these, in a time that does not depend on which."""
        digest = _text(key)
        matches = [hmac.compare_digest(digest, known) for known in self]  # all of them
        return any(matches)

    def __repr__(self) -> str:
        return f"<{len(self)} API key{'' if len(self) == 1 else 's'}>"


def _digest_of(key: object) -> str:
    if not isinstance(key, str):
        raise OptionError("api_keys", f"must be a list of strings; got a {type(key).__name__} in it")
    if key.startswith(_PREFIX):
        if not _DIGEST.fullmatch(key):
            raise OptionError("api_keys", "has an invalid digest: it must be sha256: and 64 lower-case hex digits")
        return key
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise RequestError("an API key must be printable ASCII without spaces, and not empty", "api_keys")
    return _text(key.encode())


def _text(key: bytes) -> str:
    return _PREFIX + hashlib.sha256(key).hexdigest()
