"""The form of ``run`` and ``elect``, which start another command: their options are easily taken for its own."""

from __future__ import annotations

import typer
from typer.core import TyperCommand


class CommandStarter(TyperCommand):
    """``run`` or ``elect``: refuses options whose owner is not clear."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read the command line; completion reads one that is not finished."""
        if not ctx.resilient_parsing and (problem := self._misused(args, f"lockkit {ctx.info_name}")) is not None:
            raise typer.BadParameter(problem, ctx)
        return super().parse_args(ctx, args)

    def _misused(self, args: list[str], program: str) -> str | None:
        """
        Find an option behind COMMAND without ``--`` before COMMAND, or as NAME or COMMAND.

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
                for first in list(words)[: 2 - arguments_count]:
                    if first.partition("=")[0] in options:
                        return f"{first} is an option of {program}: put it before --"
                return None
            elif name not in options:
                return None  # mistyped, which has an error of its own
            elif not equals and name not in flags:
                next(words, None)  # its value
        return None
