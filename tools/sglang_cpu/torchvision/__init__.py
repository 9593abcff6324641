"""Stand-in for torchvision, whose published build needs the CUDA build of torch."""

import sys

from absent_on_cpu import Absent

__version__ = "0.28.0"
__getattr__ = Absent(__name__).__getattr__
NAMES = "io ops ops.boxes transforms transforms.functional transforms.v2 transforms.v2.functional"
"""Submodules that SGLang and transformers import."""
for name in NAMES.split():
    sys.modules[f"{__name__}.{name}"] = Absent(f"{__name__}.{name}")
