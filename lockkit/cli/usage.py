"""Help and errors of the commands, in the words of the documentation: typer has those of its parser, which change."""

from __future__ import annotations

import re
from shutil import which
from typing import Any, Final

import typer
from typer.core import TyperCommand

_WORDS: Final = {
    "int_parsing": "must be a whole number, not {input!r}",
    "greater_than_equal": "must be {ge} or more, not {input}",
    "less_than_equal": "must be {le} or less, not {input}",
}
"""What is wrong with a value, by the name that pydantic has for it: typer shows pydantic's own words."""

_CELLS: Final = re.compile(r"(\S.*?) {2,}(.+)")


def _reworded(error: typer.BadParameter) -> str:
    """Say what is wrong with a value in our words, if the error has a cause that we know."""
    for problem in getattr(error.__cause__, "errors", list)():
        if problem["type"] in _WORDS:
            return _WORDS[problem["type"]].format(input=problem["input"], **problem.get("ctx", {}))
    return error.message.removeprefix("Value error, ")


class Command(TyperCommand):
    """A command whose help and errors have the words of the documentation, without what versions of typer add."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for one in self.params:
            if one.param_type_name == "argument":  # without its Python type
                one.display_type_rich = lambda ctx: None  # type: ignore[attr-defined] # noqa: ARG005

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Give the parts of the usage line: NAME, not {NAME}."""
        return [re.sub(r"[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_help_text(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override] # noqa: ANN401, ARG002
        """Write the text above the options. A paragraph with two or more spaces in each line is a table."""
        with formatter.indentation():
            for paragraph in (self.help or "").strip().split("\n\n"):
                formatter.write_paragraph()
                cells = [_CELLS.fullmatch(row) for row in paragraph.splitlines()]
                if all(cells):
                    with formatter.indentation():
                        formatter.write_dl([match.groups() for match in cells if match is not None])
                else:
                    formatter.write_text(paragraph)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read the command line; completion reads one that is not finished."""
        if not ctx.resilient_parsing and (problem := self.misused(args, f"lockkit {ctx.info_name}")) is not None:
            raise typer.BadParameter(problem, ctx)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _reworded(error)
            raise

    def misused(self, args: list[str], program: str) -> str | None:
        """Say what is wrong with the command line of `program`, where the parser would not, or not as well."""
        del args, program
        return None


class CommandStarter(Command):
    """``run`` or ``elect``, which start another command: its options are easily taken for theirs."""

    def misused(self, args: list[str], program: str) -> str | None:
        """
        Find an option behind COMMAND without ``--`` before COMMAND, or as NAME or COMMAND; and a program as NAME.

        Otherwise ``lockkit run NAME rsync --timeout 30 …`` would wait 30 s for the lock and run rsync without it, and
        ``lockkit run NAME git checkout -- FILE`` would take the ``--``.
        """
        options = {name for one in self.params if one.param_type_name == "option" for name in one.opts}
        flags = {name for one in self.params if getattr(one, "is_flag", False) for name in one.opts}
        words = iter(args)
        arguments_count = 0
        for word in words:
            name, equals, _ = word.partition("=")
            if word == "-" or not word.startswith("-"):
                arguments_count += 1
            elif arguments_count > 1:  # NAME and COMMAND
                return (
                    f"COMMAND is followed by {word}. If it is an option of COMMAND, put -- before COMMAND; "
                    f"if it is one of {program}, put it before COMMAND"
                )
            elif word == "--":  # behind it all is NAME, COMMAND, and COMMAND's
                rest = list(words)
                for first in rest[: 2 - arguments_count]:
                    if first.partition("=")[0] in options:
                        return f"{first} is an option of {program}: put it before --"
                return _forgotten_name(rest, program) if arguments_count == 0 else None
            elif name not in options:
                return None  # mistyped, which has an error of its own
            elif not equals and name not in flags:
                next(words, None)  # its value
        return None


def _forgotten_name(words: list[str], program: str) -> str | None:
    """Suspect that NAME is missing where COMMAND would be, or where a program would be the name of a lock."""
    if not words or (len(words) > 1 and which(words[0]) is None):
        return None
    what = f"{words[0]} is a program, and would be the name: " if len(words) > 1 else ""
    return f"is NAME missing? {what}{program} NAME -- {words[0]}{' …' if len(words) > 1 else ''}"
