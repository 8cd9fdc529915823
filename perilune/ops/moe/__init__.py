"""Mixture of experts: routing, load balancing, and the experts themselves."""

from perilune.ops.moe.balance import BALANCERS, Balancer
from perilune.ops.moe.balancer import in_recompute
from perilune.ops.moe.decode import MixtureWeights, layer_decode, layer_obstacle, mlp_decode, moe_decode
from perilune.ops.moe.experts import routed_experts
from perilune.ops.moe.plan import DispatchPlan, dispatch_plan
from perilune.ops.moe.router import Routing, route

__all__ = [
    "BALANCERS",
    "Balancer",
    "DispatchPlan",
    "MixtureWeights",
    "Routing",
    "dispatch_plan",
    "in_recompute",
    "layer_decode",
    "layer_obstacle",
    "mlp_decode",
    "moe_decode",
    "route",
    "routed_experts",
]
