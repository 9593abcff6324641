"""Run by Python itself, first of all, where this folder is on PYTHONPATH: the fake device for this
process and, through the environment, for those that it starts.
"""

import os
import sys
from pathlib import Path

if os.environ.get("RAGEN_FAKE_CUDA"):
    sys.path.append(str(Path(__file__).parents[3]))
    import tests.fake_cuda.activate  # noqa: F401
