"""Everything on megatron-core and Transformer Engine; no other package imports them."""

import logging
import warnings

# megatron-core says at import that Transformer Engine and Apex are absent, and on a CPU that CUDA
# settings are missing.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS.*")
logging.getLogger("megatron.core").setLevel(logging.ERROR)
