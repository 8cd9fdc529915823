"""Optimizers: per-head Muon with AdamW, schedule, QK-clip."""

from perilune.optim.build import Optimizer
from perilune.optim.groups import Cut, Treatment, treatment
from perilune.optim.muon import Muon
from perilune.optim.schedule import multiplier

__all__ = ["Cut", "Muon", "Optimizer", "Treatment", "multiplier", "treatment"]
