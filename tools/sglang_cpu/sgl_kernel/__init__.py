"""Stand-in for SGLang's kernel package, of which there is no build for the CPU.

There are no submodules: SGLang takes the absence of some as the sign that a feature is missing.
"""

from absent_on_cpu import Absent

__version__ = "0.4.5"
__getattr__ = Absent(__name__).__getattr__
