"""Which addresses other machines can reach, and what a server there must have."""

from __future__ import annotations

import ipaddress

from perilune.errors import ConfigError

LOOPBACK = frozenset(("127.0.0.1", "localhost", "::1"))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_names(host: str) -> frozenset[str] | None:
    """Names in the Host header that a server at this address answers to; None = all."""
    return LOOPBACK | {host} if is_loopback(host) else None


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
