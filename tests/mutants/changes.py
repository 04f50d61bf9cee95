"""What is changed: the text, and in Python also whole conditions and statements."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

ALL = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "+": "-", "-": "+"}
PYTHON = {"==": "!=", "!=": "==", "+=": "-=", "-=": "+=", "is not": "is", "is": "is not", "not in": "in"}
PYTHON |= {"and": "or", "or": "and", "min(": "max(", "max(": "min(", "True": "False", "False": "True"}
LUA = {"==": "~=", "~=": "==", "and": "or", "or": "and"}
WORDS = {"python": ALL | PYTHON, "lua": ALL | LUA, "sql": ALL | {"=": "<>", "<>": "=", "AND": "OR", "OR": "AND"}}
# Python by its strings and comments; how those strings are known to be Lua or SQL, and what in them stays.
PARTS = r"""\"""(?s:.*?)\"""|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|#[^\n]*|[^"'#]+"""
KNOWN = {"lua": r"\bredis\.p?call\(", "sql": r"\b(SELECT|UPDATE|WHERE|SET|FROM|AND|OR|NOT|CASE|IF|COALESCE|VALUES)\b"}
ASSIGNED = r'(?:\bSET|UPDATE|,|^f?") *[\w.]+ = '
FIXED = {"lua": r"""--[^\n]*|'[^'\n]*'|"[^"\n]*\"""", "sql": rf"\{{[^{{}}]*\}}|'[^'\n]*'|{ASSIGNED}"}


def changes(language: str, suffix: str, text: str) -> Iterator[tuple[int, int, str, str]]:
    """Find all changes of a file: start and end of what is replaced, by what, and their kind."""
    shown = (
        re.sub(PARTS, lambda part: _only(language, part[0]), text) if suffix == ".py" else _blank(text, FIXED["lua"])
    )
    words = "|".join(map(re.escape, sorted(WORDS[language], key=len, reverse=True)))
    for found in re.finditer(
        rf"(?<![^\s(\[{{=])(?:{words})(?=[\s),\]}}:]|(?<=\())|(?<![\w$.])\d[\d_]*(?:\.\d+)?(?![\w.])", shown
    ):
        old = found[0]
        new = WORDS[language].get(old) or str((float if "." in old else int)(old) + 1)
        yield *found.span(), new, f"{old} to {new}"
    starts = [0, *(found.end() for found in re.finditer("\n", text))]
    for node in ast.walk(ast.parse(text)) if language == "python" else ():
        statement = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
        for part in [node] if statement else getattr(node, "ifs", None) or [getattr(node, "test", None)]:
            if isinstance(part, ast.expr | ast.stmt) and ast.unparse(part) != "TYPE_CHECKING":
                source = ast.get_source_segment(text, part) or ""
                start = starts[part.lineno - 1] + part.col_offset
                change = ("pass", "statement dropped") if statement else (f"(not ({source}))", "condition negated")
                yield start, start + len(source), *change


def _blank(text: str, pattern: str = r"(?s:.+)") -> str:
    return re.sub(pattern, lambda found: re.sub(r"\S", " ", found[0]), text)


def _only(language: str, part: str) -> str:
    """Blank a part of a Python file, or of it what is not of the language."""
    if part[0] not in "\"'#":
        return part if language == "python" else _blank(part)
    known = part[0] != "#" and (language == "lua" or part[:3] != '"""') and re.search(KNOWN.get(language, "$."), part)
    return _blank(part, FIXED[language]) if known else _blank(part)
