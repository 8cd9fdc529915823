"""Who may use the service: bearer keys, and no pages of other sites."""

from __future__ import annotations

import hmac
import ipaddress

from starlette.requests import Request

from perilune.errors import ConfigError
from perilune.sandbox.api.envelope import APIError

LOOPBACK = frozenset(("127.0.0.1", "localhost", "::1"))


class Access:
    """Checks of one server.

    Args:
        keys: bearer keys; empty = everybody who reaches the port.
        hosts: names in the Host header that are answered; None = all.
    """

    def __init__(self, keys: tuple[str, ...], hosts: frozenset[str] | None) -> None:
        self._keys = tuple(key.encode() for key in keys)
        self._hosts = hosts

    def check_site(self, request: Request) -> None:
        """Refuse pages of other sites (Origin) and names that were pointed at this machine after a page had loaded (Host)."""
        host = request.headers.get("host", "")
        name, _, port = host.rpartition(":")
        name = (name if port.isdigit() else host).strip("[]").lower()
        if self._hosts is not None and name not in self._hosts:
            allowed = ", ".join(sorted(self._hosts))
            raise APIError(403, f"the Host header says {host!r}; this server answers to {allowed}")
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise APIError(403, f"requests from pages of {origin} are not allowed")

    def check(self, request: Request) -> None:
        """The site, and the bearer key; every key is compared, each in constant time."""
        self.check_site(request)
        if not self._keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise APIError(
                401, "a valid API key is needed: send the header 'Authorization: Bearer KEY'", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, keys: tuple[str, ...], no_auth: bool) -> None:
    """Refuse to listen where others can connect, unless they need a key or the user has said that they need none.

    Raises:
        ConfigError: another address than this machine's own, without a key and without `no_auth`; or an empty key.
    """
    if any(not key.strip() for key in keys):
        raise ConfigError("an API key is empty; give a non-empty --api-key, or leave the flag out")
    if not is_loopback(host) and not keys and not no_auth:
        raise ConfigError(
            f"--host {host} can be reached by other machines, and there is no API key; give --api-key KEY, "
            "or say --no-auth, or listen on 127.0.0.1"
        )
