"""
Loaded by each Python that starts with this folder in its ``PYTHONPATH``: what a program spawns is forked.

Programs of the documentation and of examples/ spawn up to eight processes, as programs do whose processes are to be the
same on each system. Each of them imports a driver, which takes a third of a second, and works for some milliseconds.
Here `multiprocessing` forks them from one process, its own fork server, that has imported the program and the driver.
They share no more than spawned ones: the target and its arguments are pickled, and nothing else is inherited.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # imported, it would slow down every program
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

PRELOAD = "LOCKKIT_TEST_PRELOAD"
"""Names the modules that are imported beside the program, with spaces between them."""


class _Finder:
    """Changes the module once it is imported: importing it here would slow down every program."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name != "multiprocessing":
            return None
        sys.meta_path.remove(cls)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            from multiprocessing import context  # noqa: PLC0415 - just made

            class Spawned(context.ForkServerContext):
                def _check_available(self) -> None:
                    super()._check_available()
                    self.set_forkserver_preload(["__main__", *os.environ.get(PRELOAD, "").split()])

            context._concrete_contexts["spawn"] = Spawned()  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder)
