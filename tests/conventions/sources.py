"""The modules of lockkit, and what each imports when it is loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Module:
    """
    One module of the package.

    Attributes:
        name: Dotted name.
        path: Its file.
    """

    name: str
    path: Path

    @property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return _parse(self.path)


@cache
def _parse(path: Path) -> ast.Module:
    """Parse a file: when a test needs it, because each process that runs tests imports this."""
    return ast.parse(path.read_text(), str(path))


@cache
def modules() -> dict[str, Module]:
    """All modules of lockkit and its tools by name, the conformance tests among them."""
    found = {}
    for root, package in ((ROOT, "lockkit"), (ROOT / "tools", "lockkit_tools")):
        for path in sorted((root / package).rglob("*.py")):
            if not path.stem.isidentifier():
                continue  # a hook of PyInstaller, which nothing can import
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path)
    return found


def imported(module: Module, *, also_later: bool = False, everything: bool = False) -> Iterator[str]:
    """Dotted names that a module imports, whether they are modules or names in modules."""
    pending: list[ast.AST] = [*module.tree.body]
    # Statements alone: an expression imports nothing, and most of a tree is expressions.
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not everything and isinstance(node, ast.If) and _is_for_type_checkers(node):
            pending += node.orelse
        elif also_later or everything or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "handlers", "orelse", "finalbody", "cases"):
                pending += getattr(node, block, [])


def _is_for_type_checkers(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
