"""What one request may ask for, and what of the host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perilune.errors import ConfigError
from perilune.sandbox.protocol import Spec


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """What one request may ask for.

    Attributes:
        body_bytes: largest JSON body.
        file_bytes: largest file in either direction.
        commands: that run or connections to ports that are open at once; each holds a thread.
        heartbeat_seconds: silence after which a stream sends a comment, so that proxies keep it open.
    """

    body_bytes: int = 1 << 20
    file_bytes: int = 256 << 20
    commands: int = 256
    heartbeat_seconds: float = 10.0


@dataclass(frozen=True, kw_only=True)
class Permissions:
    """What of the host clients may ask for; nothing of it unless the operator says so.

    Attributes:
        images: folders (root file systems, or folders of them) that a sandbox may start from; names of images, for docker.
        trees: host folders that a guest may see, with all below them.
        networks: network policies.
    """

    images: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()
    networks: tuple[str, ...] = ("none",)

    def check(self, spec: Spec, driver: str) -> None:
        """Raise ConfigError for a wish that is not allowed."""
        # Without a slash it is one of the driver's own, such as a machine's "python"; docker's are everything that its engine has.
        own = spec.template == "host" or ("/" not in spec.template and driver != "docker")
        if (
            not own
            and spec.template not in self.images
            and not (driver != "docker" and _inside(spec.template, self.images))
        ):
            raise ConfigError(
                f"image {spec.template!r} may not be used here; allowed are: {', '.join(self.images) or 'none'}"
            )
        for tree in spec.trees:
            if not _inside(tree, self.trees):
                raise ConfigError(
                    f"tree {tree!r} may not be shown here; allowed are: {', '.join(self.trees) or 'none'}"
                )
        if spec.network not in self.networks:
            raise ConfigError(f"network {spec.network!r} is not allowed here; allowed are: {', '.join(self.networks)}")


def _inside(folder: str, allowed: tuple[str, ...]) -> bool:
    path = Path(folder).expanduser().resolve()
    return any(path.is_relative_to(Path(one).expanduser().resolve()) for one in allowed)
