"""Training: the step, the loop, and what happens beside it."""

from perilune.train.nonfinite import DivergedError
from perilune.train.step import StepResult, train_step
from perilune.train.trainer import Summary, Trainer

__all__ = ["DivergedError", "StepResult", "Summary", "Trainer", "train_step"]
