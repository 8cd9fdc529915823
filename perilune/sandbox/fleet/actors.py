"""Nodes as Ray actors, one on each machine of a Ray cluster; and answers with a time limit and typed errors."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perilune.errors import ConfigError, SandboxError
from perilune.sandbox.protocol import GuestLost

CALL_SECONDS = 660.0
"""Longest a call of a node may take: a command's default time and a bit."""
NAMESPACE = "perilune-sandbox"
THREADS = 64
"""Calls that a node answers at once."""


class NodeGone(GuestLost):
    """A node of the fleet has ended; what ran there is lost, what was copied elsewhere is not."""


def ray() -> Any:
    """The package. Raises ConfigError, naming the extra."""
    try:
        import ray as package
    except ImportError:
        raise ConfigError("a fleet needs Ray: pip install perilune[ray]") from None
    return package


def ask(reference: Any, seconds: float = CALL_SECONDS) -> Any:
    """An actor's answer.

    Raises:
        NodeGone: the actor or its machine has ended.
        SandboxError: no answer in that time.
    """
    package = ray()
    try:
        return package.get(reference, timeout=seconds)
    except package.exceptions.GetTimeoutError:
        raise SandboxError(f"a node of the fleet gave no answer within {seconds:g} s") from None
    except (
        package.exceptions.RayActorError,
        package.exceptions.NodeDiedError,
        package.exceptions.ObjectLostError,
    ) as error:
        raise NodeGone(f"a node of the fleet has ended: {str(error).splitlines()[0]}") from None


def node_names(nodes: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Ray's id -> a name that lasts over restarts where machines have names of their own; two of one name get their id as well."""
    names = [str(node.get("NodeName") or node["NodeManagerAddress"]) for node in nodes]
    return {
        node["NodeID"]: name if names.count(name) == 1 else f"{name}-{node['NodeID'][:8]}"
        for node, name in zip(nodes, names)
    }


def machines() -> dict[str, str]:
    """The machines of the cluster that are alive: Ray's id -> name."""
    return node_names([node for node in ray().nodes() if node["Alive"]])


def start_nodes(folder: Path, limits: dict[str, Any], sync: str) -> dict[str, Any]:
    """An actor on each machine that is alive: name -> handle. Each has its own folder under `folder`, on its own disk."""
    package = ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from perilune.sandbox.fleet.node import Node

    kind = package.remote(Node)
    actors = {}
    for node_id, name in sorted(machines().items(), key=lambda pair: pair[1]):
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        # The actor's own namespaces and control groups do the limiting: Ray only has to put it there.
        made = kind.options(scheduling_strategy=place, num_cpus=0, max_concurrency=THREADS, max_restarts=0)
        actors[name] = made.remote(name, str(folder / name), limits, sync)
    for actor in actors.values():
        ask(actor.about.remote(), 120.0)
    return actors


def begin(address: str | None) -> bool:
    """Connect to a cluster, or start one of this machine alone; True if this did it.

    Raises:
        ConfigError: there is no cluster at the address.
    """
    package = ray()
    if package.is_initialized():
        return False
    # Children of a driver would report usage otherwise.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        _answers(address)
        package.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, include_dashboard=False, configure_logging=False
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"there is no Ray cluster at address={address!r}: {str(error).splitlines()[0] if str(error) else error!r}; begin one "
            "with ray start --head, or leave the address out for one of this machine alone"
        ) from None
    return True


def _answers(address: str | None) -> None:
    """Raise OSError where nobody listens: Ray itself would look for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), 10.0).close()
