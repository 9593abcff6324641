"""Numbers that functions of users return: Python's numbers, and scalars of NumPy and torch."""

from typing import Any, SupportsFloat


def as_number(value: Any) -> float | None:
    """Return a number, a truth value, or an array or tensor with a single element as a float, which
    may be NaN or infinite; None for anything else.
    """
    if callable(read := getattr(value, "item", None)) and hasattr(value, "dtype"):
        try:
            value = read()
        except (TypeError, ValueError, RuntimeError):  # it has several elements, or none
            return None
    if not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond all floats
        return float("inf")
    except (TypeError, ValueError, RuntimeError):
        return None
