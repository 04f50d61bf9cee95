"""Parameters that are times say their unit: by their type (`lockkit.units`) or in their name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.conventions.sources import Module, modules

TIMES = re.compile(
    r"(?:.*_)?(?:after|anchor|answer_by|deadline|duration|grace|interval|patience|pause|since|started|timeout|ttl|until)"
)
"""Names that are a span or a point of time wherever they occur."""

UNITS = re.compile(r".*(?:seconds|_ms|_us|_ns)")

OWN_UNIT = {
    # threading.Lock's signature, as its adapter must have it.
    "lockkit.sync.lock.ThreadingLock.acquire.timeout",
}
"""Parameters that another library's signature decides."""

CHECKED = [
    module
    for module in modules().values()
    if not module.name.startswith(("lockkit.backends.", "lockkit_tools.bench.page"))
]


def float_times(module: Module) -> set[str]:
    """Parameters of a module that are a time, and of which neither type nor name says the unit."""
    found = set()

    def look(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                look(child, f"{inside}.{child.name}")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                look(child, f"{inside}.{child.name}")
                arguments = child.args
                for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                    if TIMES.fullmatch(one.arg) and not UNITS.fullmatch(one.arg) and is_bare(one.annotation):
                        found.add(f"{inside}.{child.name}.{one.arg}")
            else:
                look(child, inside)

    look(module.tree, module.name)
    return found


def is_bare(annotation: ast.expr | None) -> bool:
    """Tell whether an annotation is a float or has one in a union; an option of a command says its unit in its help."""
    if isinstance(annotation, ast.BinOp):
        return is_bare(annotation.left) or is_bare(annotation.right)
    return isinstance(annotation, ast.Name) and annotation.id == "float"


def test_times_say_their_unit() -> None:
    """A reader of a signature must not have to guess whether a number is a span or a point of time, or its unit."""
    assert {name for module in CHECKED for name in float_times(module)} - OWN_UNIT == set()


def test_a_bare_float_is_found(tmp_path: Path) -> None:
    """In methods, nested functions and unions; not where the type or the name says the unit."""
    source = """
class Lock:
    def acquire(self, timeout: float | None, ttl_seconds: float, ttl: Seconds, rate: float) -> None:
        def inner(*, retry_after: float = 0) -> None: ...
"""
    path = tmp_path / "m.py"
    path.write_text(source)

    assert float_times(Module("m", path)) == {"m.Lock.acquire.timeout", "m.Lock.acquire.inner.retry_after"}
