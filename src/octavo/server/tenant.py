"""Who asks, and which part of the prefix cache is theirs. It does not know HTTP beyond the header's text.

A namespace is derived here, on the server, from the credential; a client's `cache_salt` can only narrow it: no salt
leads into another tenant's namespace, because key and salt are hashed in separate, length-framed fields.
"""

from __future__ import annotations

import hashlib
import hmac

_DOMAIN = b"octavo namespace 1"


class ApiKeys:
    """The keys that open the server, kept as digests. None at all: everybody is the one tenant ""."""

    def __init__(self, api_keys: tuple[str, ...]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in api_keys)

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def tenant_of(self, authorization: str | None) -> str | None:
        """The tenant of an `Authorization: Bearer KEY` header, or None when it opens nothing.

        Every key is compared, in constant time, whichever matches.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given = hashlib.sha256(key.strip().encode()).digest()
        tenant = None
        for digest in self._digests:
            if hmac.compare_digest(digest, given):
                tenant = digest.hex()
        return tenant if scheme.lower() == "bearer" else None


def namespace(tenant: str, cache_salt: str | None) -> str:
    """ "" for the one tenant of an open server without a salt; else a hash that no other pair gives."""
    if not tenant and cache_salt is None:
        return ""
    state = hashlib.sha256(_DOMAIN)
    for part in (tenant.encode(), None if cache_salt is None else cache_salt.encode("utf-8", "surrogatepass")):
        state.update(b"-" if part is None else b"+%d:" % len(part) + part)
    return state.hexdigest()
