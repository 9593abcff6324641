"""Every setting of a run: validated dataclasses, their flags, and recipes."""

from ragen_mega.config.cli import parse, read_flags, with_recipe
from ragen_mega.config.sections.advantage import AdvantageConfig
from ragen_mega.config.sections.checkpoint import CheckpointConfig
from ragen_mega.config.sections.environment import EnvironmentConfig
from ragen_mega.config.sections.evaluation import EvaluationConfig
from ragen_mega.config.sections.filter import FilterConfig
from ragen_mega.config.sections.guard import GuardConfig
from ragen_mega.config.sections.logging import LoggingConfig
from ragen_mega.config.sections.lora import LoraConfig
from ragen_mega.config.sections.loss import LossConfig
from ragen_mega.config.sections.model import ModelConfig
from ragen_mega.config.sections.parallel import OffloadMode, ParallelConfig, Recompute
from ragen_mega.config.sections.rollout import RolloutConfig
from ragen_mega.config.sections.train import TrainConfig
from ragen_mega.config.sections.warm_start import WarmStartConfig
from ragen_mega.config.starpo import StarPOConfig

__all__ = [
    "AdvantageConfig",
    "CheckpointConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "FilterConfig",
    "GuardConfig",
    "LoggingConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OffloadMode",
    "ParallelConfig",
    "Recompute",
    "RolloutConfig",
    "StarPOConfig",
    "TrainConfig",
    "WarmStartConfig",
    "parse",
    "read_flags",
    "with_recipe",
]
