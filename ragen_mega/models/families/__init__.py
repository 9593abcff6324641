"""One file for each model family: names, cuts, and entries of config.json."""

from ragen_mega.models.families.llama import LLAMA
from ragen_mega.models.families.mistral import MISTRAL
from ragen_mega.models.families.qwen2 import QWEN2
from ragen_mega.models.families.qwen3 import QWEN3
from ragen_mega.models.families.qwen3_moe import QWEN3_MOE
from ragen_mega.models.family import Family

FAMILIES = {family.model_type: family for family in (QWEN2, QWEN3, QWEN3_MOE, LLAMA, MISTRAL)}


def find_family(model_type: object) -> Family:
    """Return the family of this name. Raises ValueError if it is unknown."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type must be one of {', '.join(FAMILIES)}, not {model_type!r}; pick another"
            " --load"
        )
    return FAMILIES[model_type]
