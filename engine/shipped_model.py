"""The small model that ships with the project, and that runs where no other is named."""

from __future__ import annotations

from pathlib import Path

import vattn
from vattn.errors import ConfigError

SHIPPED_MODEL = Path(vattn.__file__).parent / "demo_model"


def shipped_model() -> str:
    """The path of the model.

    Raises:
        ConfigError: this installation has none.
    """
    if not (SHIPPED_MODEL / "config.json").exists():
        raise ConfigError(
            f"no model was given, and the one that ships with vattn is not at {SHIPPED_MODEL}; give a path or hub id"
        )
    return str(SHIPPED_MODEL)
