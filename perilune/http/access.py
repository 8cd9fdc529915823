"""Who may use a server: bearer keys, and no pages of other sites."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from perilune.http.errors import APIError


class Access:
    """Checks of one server.

    Args:
        keys: bearer keys; empty = everybody who reaches the port.
        hosts: names in the Host header that are answered; None = all.
    """

    def __init__(self, keys: tuple[str, ...], hosts: frozenset[str] | None) -> None:
        self._keys = tuple(key.strip().encode() for key in keys)
        self._hosts = hosts

    def check_site(self, request: Request) -> None:
        """A page of another site must not use this server through somebody's browser.

        The Origin header stops plain cross-site requests; the Host header stops a name that was pointed at this
        machine after its page had loaded (DNS rebinding).
        """
        host = request.headers.get("host", "")
        name, _, port = host.rpartition(":")
        name = (name if port.isdigit() else host).strip("[]").lower()
        if self._hosts is not None and name not in self._hosts:
            raise APIError(
                403, f"the Host header says {host!r}; this server answers to {', '.join(sorted(self._hosts))}"
            )
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise APIError(403, f"requests from pages of {origin} are not allowed")

    def check_key(self, request: Request) -> None:
        """The bearer key must be one of the allowed ones; each is compared in constant time."""
        if not self._keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        sent = given.strip().encode("latin-1")  # as which the framework reads the bytes of headers
        matches = [hmac.compare_digest(sent, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise APIError(
                401, "a valid API key is needed: send the header 'Authorization: Bearer KEY'", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip

    def check(self, request: Request) -> None:
        """Both."""
        self.check_site(request)
        self.check_key(request)
