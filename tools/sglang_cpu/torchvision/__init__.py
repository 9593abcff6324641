"""Stand-in for torchvision, whose published build needs the CUDA build of torch."""

from absent_on_cpu import refuse, stand_in

__version__ = "0.28.0"
__getattr__ = stand_in(__name__, refuse(__name__))
