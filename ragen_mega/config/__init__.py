"""Every setting of a run: validated dataclasses, the flags made of them, and recipes."""

from ragen_mega.config.cli import parse, read_flags, with_recipe
from ragen_mega.config.schema import (
    AdvantageConfig,
    CheckpointConfig,
    EnvironmentConfig,
    EvaluationConfig,
    FilterConfig,
    GuardConfig,
    LoggingConfig,
    LossConfig,
    ModelConfig,
    OffloadMode,
    ParallelConfig,
    RolloutConfig,
    StarPOConfig,
    TrainConfig,
    WarmStartConfig,
)

__all__ = [
    "AdvantageConfig",
    "CheckpointConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "FilterConfig",
    "GuardConfig",
    "LoggingConfig",
    "LossConfig",
    "ModelConfig",
    "OffloadMode",
    "ParallelConfig",
    "RolloutConfig",
    "StarPOConfig",
    "TrainConfig",
    "WarmStartConfig",
    "parse",
    "read_flags",
    "with_recipe",
]
