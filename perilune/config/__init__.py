"""Configuration: frozen dataclasses, presets, and one parser for TOML files and flags."""

from perilune.config.model import KDAConfig, MLAConfig, ModelConfig, MoEConfig, SoftmaxConfig, VisionConfig
from perilune.config.train import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    OptimConfig,
    QuantConfig,
    StageConfig,
    TrainConfig,
    VisionDataConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "KDAConfig",
    "MLAConfig",
    "ModelConfig",
    "MoEConfig",
    "OptimConfig",
    "QuantConfig",
    "SoftmaxConfig",
    "StageConfig",
    "TrainConfig",
    "VisionConfig",
    "VisionDataConfig",
]
