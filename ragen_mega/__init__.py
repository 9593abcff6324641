"""StarPO (arXiv:2504.20073) on Megatron-Core: reinforcement learning of language-model agents over
whole trajectories.
"""

__version__ = "0.1.0"
