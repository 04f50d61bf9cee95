"""Guards, optimistic updates and `lock_in`: a package for each store, which needs the driver of that store."""

from __future__ import annotations

import importlib
from typing import Any

from lockkit.errors import ConfigurationError


def load(store: str, module: str, needed_by: str) -> Any:  # noqa: ANN401 - a module, whose names mypy cannot know
    """
    Import a module of a store, and its driver with it.

    Args:
        store: ``redis``, ``etcd``, ``sql`` or ``zookeeper``; also the name of the extra that installs the driver.
        module: Its module in `lockkit.storage`.
        needed_by: What the user called, for the error.
    """
    try:
        return importlib.import_module(f"lockkit.storage.{store}.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("lockkit"):
            raise
        message = f"{needed_by} needs the module {error.name!r}: pip install 'lockkit[{store}]'"
        raise ConfigurationError(message) from error
