"""matplotlib for programs without a screen."""

from types import ModuleType

from ragen_mega.extensions.extras import require


def headless_pyplot() -> ModuleType:
    """Import `matplotlib.pyplot`, which then draws into files only. Raises ValueError with the
    command that installs matplotlib where it is missing.
    """
    require("studies", "plots")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
