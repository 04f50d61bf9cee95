"""Public names: documented, importable, and errors of one family."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
from collections.abc import Iterator

import pytest

import lockkit
import lockkit.errors
from tests.conventions.sources import ROOT, modules

LIBRARY = [name for name in modules() if not name.startswith(("lockkit.testing", "lockkit.cli", "lockkit_tools.bench"))]
PUBLIC = [name for name in LIBRARY if name.count(".") == 1]
BUILTIN_BASES = {
    "BackendUnavailable": ConnectionError,
    "ConfigurationError": ValueError,
    "LockTimeout": TimeoutError,
    "NoQuorum": ConnectionError,
    "Unsupported": NotImplementedError,
}
ERRORS = [
    value for value in vars(lockkit.errors).values() if isinstance(value, type) and issubclass(value, BaseException)
]


def public_things(module_name: str) -> Iterator[tuple[str, object]]:
    """The names of a module that are promises, with the public members of its classes."""
    module = importlib.import_module(module_name)
    for name in module.__all__ if hasattr(module, "__all__") else ():
        thing = getattr(module, name)
        yield f"{module_name}.{name}", thing
        if isinstance(thing, type) and thing.__module__ == module_name:
            for member_name, member in vars(thing).items():
                if not member_name.startswith("_") and (callable(member) or isinstance(member, property)):
                    yield f"{module_name}.{name}.{member_name}", member


def test_public_names_are_there_and_documented() -> None:
    """Every module, public class and function, and their public members, say what they do."""
    undocumented = [name for name in LIBRARY if not inspect.getdoc(importlib.import_module(name))]
    undocumented += [
        name
        for module_name in LIBRARY
        for name, thing in public_things(module_name)
        if (inspect.isroutine(thing) or isinstance(thing, type | property)) and not inspect.getdoc(thing)
    ]
    assert undocumented == []


def test_dir_lists_the_lazy_names_too() -> None:
    """Whoever explores `lockkit` sees all of it, and each name is there."""
    assert set(lockkit.__all__) <= set(dir(lockkit))
    assert all(hasattr(lockkit, name) for name in lockkit.__all__)


def test_every_error_of_the_library_is_a_lock_error() -> None:
    """One `except lockkit.LockError` catches all, whichever module it comes from."""
    strangers = [
        f"{name}.{key}"
        for name in PUBLIC
        for key, value in vars(importlib.import_module(name)).items()
        if isinstance(value, type)
        and issubclass(value, BaseException)
        and value.__module__ == name
        and not issubclass(value, lockkit.LockError)
    ]

    assert strangers == []


@pytest.mark.parametrize("error_class", ERRORS, ids=lambda cls: cls.__name__)
def test_error_is_public_and_has_its_builtin_base(error_class: type[lockkit.LockError]) -> None:
    """An error can be imported from `lockkit`, and is what a user may already catch."""
    assert getattr(lockkit, error_class.__name__) is error_class
    assert issubclass(error_class, lockkit.LockError)
    assert issubclass(error_class, BUILTIN_BASES.get(error_class.__name__, Exception))
    # The OSError bases would show [Errno …], or fail.
    assert (str(error_class()), str(error_class("text"))) == ("", "text")
    assert (error_class().name, error_class().backend) == (None, None)


@pytest.mark.parametrize("error_class", ERRORS, ids=lambda cls: cls.__name__)
def test_error_survives_pickling(error_class: type[lockkit.LockError]) -> None:
    """An error that crosses processes keeps its message and its facts."""
    error = error_class("what happened", name="seat:12A", backend="redis://***@h")

    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes

    assert type(copy) is error_class
    assert (str(copy), copy.name, copy.backend) == ("what happened", "seat:12A", "redis://***@h")


def test_nothing_is_left_for_later() -> None:
    """No page or source says that something is still to be done (ruff sees to comments in Python)."""
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    files = [
        path
        for folder in ("lockkit", "docs", "compose", "changelog.d")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".md", ".lua", ".sql", ".proto", ".yaml", ".yml"}
    ]

    assert [str(path) for path in files if marks.search(path.read_text())] == []
