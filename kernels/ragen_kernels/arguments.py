"""Names of kernel arguments, on which the launches' behaviour depends."""

PER_TOKEN = (
    "LABELS", "OLD", "ADVANTAGES", "WEIGHTS", "REF", "ROLLOUT", "OUT", "LSE", "MEAN", "TARGET", "LOGPROBS", "ENTROPY",
    "D_LOGPROBS", "D_ENTROPY", "REWARDS", "VALUES", "MASK", "TURN_ENDS", "OFFSETS", "RETURNS", "MOMENTS", "SCORES",
    "GROUPS", "LOSSES", "CLIPPED", "D_VALUES",
)  # fmt: skip
"""Pointers to one or a few numbers per token or trajectory. They are slices of a batch or rows of a
buffer, so whether they are multiples of 16 bytes depends on lengths; a kernel compiled for each
combination would stop training for seconds.
"""
