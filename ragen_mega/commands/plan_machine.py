"""The machine that `--hardware` names."""

import json
from pathlib import Path

from ragen_mega.models.hardware import Constants, Hardware, Machine, find_hardware


def find_machine(name: str, constants: Constants | None = None) -> Machine:
    """A row of the table under `constants` (default: those of the published steps), or what
    --calibrate wrote; a file that has no constants gets those. Raises ValueError for neither.
    """
    usual = constants or Constants()
    if not name.endswith(".json"):
        return Machine(find_hardware(name), usual)
    try:
        values = json.loads(Path(name).read_text())
        measured = values.get("constants")
        hardware = Hardware(**values["hardware"])
        return Machine(hardware, usual if measured is None else Constants(**measured))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(
            f"--hardware {name} must be a file that --calibrate wrote ({error}); write it again"
        ) from None
