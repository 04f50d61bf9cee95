"""Guards, optimistic updates and `lock_in`: a module or package for each store, which needs that store's driver."""

from __future__ import annotations

import importlib
from typing import Any

from lockkit.errors import ConfigurationError


def load(module: str, needed_by: str) -> Any:  # noqa: ANN401 - a module, whose names mypy cannot know
    """
    Import a module of a store, and its driver with it.

    Args:
        module: In `lockkit.storage`. Its first part is also the name of the extra that installs the driver.
        needed_by: What the user called, for the error.
    """
    try:
        return importlib.import_module(f"lockkit.storage.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lockkit"):
            raise
        message = f"{needed_by} needs the module {error.name!r}: pip install 'lockkit[{module.partition('.')[0]}]'"
        raise ConfigurationError(message) from error
