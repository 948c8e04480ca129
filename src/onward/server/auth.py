"""Who may ask: API keys, and the names that a server answers to."""

import hashlib
import hmac
from collections.abc import Iterable

from onward.openai import BodyError


class Keys:
    """API keys. Only their digests are held, and checking takes as long for any text that is no key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, authorization: bytes | None) -> None:
        """authorization: the header of that name.

        Raises:
            BodyError: there are keys, and the header has none of them.
        """
        if not self._digests:
            return
        scheme, _, key = (authorization or b"").partition(b" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]  # all of them, in any case
        if scheme.lower() != b"bearer" or not any(matches):
            problem = "no API key" if authorization is None else "a wrong API key"
            raise BodyError(
                f"{problem}: this server wants the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                status=401,
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def check_host(host: bytes | None, hosts: Iterable[str]) -> None:
    """A page of a stranger's can point its own name at this machine; the Host header then tells.

    hosts: names that are right; none allows any.

    Raises:
        BodyError: another name.
    """
    names = {name.lower() for name in hosts}
    if not names:
        return
    name = (host or b"").decode("latin-1").lower()
    name = name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name
    if name.strip("[]") not in names:
        message = f"this server does not answer to the name {name!r}; --allow-host makes it"
        raise BodyError(message, code="unknown_host", status=403)
