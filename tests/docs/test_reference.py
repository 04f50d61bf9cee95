"""The reference has everything that is public: classes and functions, commands, options and variables."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pkgutil import resolve_name
from types import ModuleType

import pytest
import typer

from lockkit.cli.app import app
from tests.docs.story import ROOT

REFERENCE = ROOT / "docs" / "reference"
COMMAND_LINE = (REFERENCE / "cli.md").read_text()
# They have more options than a table bears: their pages show what each is for, and `--help` has all.
WITH_A_PAGE = {"lab", "bench"}

GROUP = typer.main.get_command(app)
CONTEXT = typer.Context(GROUP)
COMMANDS = {name: GROUP.get_command(CONTEXT, name) for name in GROUP.list_commands(CONTEXT)}  # type: ignore[attr-defined]


def shown() -> list[object]:
    """What the pages of the reference show; of a module, what it exports."""
    text = "\n".join(page.read_text() for page in REFERENCE.rglob("*.md"))
    found = [resolve_name(path) for path in re.findall(r"^::: (\S+)", text, re.MULTILINE)]
    modules = [value for value in found if isinstance(value, ModuleType)]
    return [*found, *(getattr(module, name) for module in modules for name in getattr(module, "__all__", ()))]


@pytest.mark.parametrize("module", ["", ".aio", ".fencing", ".observers", ".optimistic", ".sql"])
def test_reference_has_every_public_class_and_function(module: str) -> None:
    """What can be imported can be looked up."""
    public = import_module(f"lockkit{module}")
    values = {name: getattr(public, name) for name in public.__all__}
    named = {name: value for name, value in values.items() if inspect.isclass(value) or inspect.isroutine(value)}
    there = {id(value) for value in shown()}

    assert named
    assert [name for name, value in named.items() if id(value) not in there] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_reference_has_every_command_with_its_options(name: str) -> None:
    """Nobody has to read the source for an option."""
    assert f"| `lockkit {name}" in COMMAND_LINE

    options = {option for parameter in COMMANDS[name].params for option in parameter.opts if option.startswith("--")}
    assert name in WITH_A_PAGE or [option for option in sorted(options) if f"`{option}`" not in COMMAND_LINE] == []


def test_reference_has_every_variable_of_a_command() -> None:
    """The variables that the help names are those of the page."""
    variables = set(re.findall(r"LOCKKIT_[A-Z]+", COMMANDS["run"].help))

    assert variables
    assert [name for name in sorted(variables) if f"| `{name}` |" not in COMMAND_LINE] == []
