"""Which addresses other machines can reach, and what a server there must have."""

from __future__ import annotations

import ipaddress

from perilune.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, api_keys: tuple[str, ...], no_auth: bool) -> None:
    """Refuse to listen where others can connect, unless they need a key or the user has said that they need none.

    Raises:
        ConfigError: another address than this machine's own, without a key and without `no_auth`; or an empty key.
    """
    if any(not key.strip() for key in api_keys):
        raise ConfigError("an API key is empty; give a non-empty --api-key, or leave the flag out")
    if not is_loopback(host) and not api_keys and not no_auth:
        raise ConfigError(
            f"--host {host} can be reached by other machines, and there is no API key; give --api-key KEY, "
            "or say --no-auth, or listen on 127.0.0.1"
        )
