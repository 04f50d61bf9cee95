"""
``python -m lockkit_tools.servers``: which servers are here, and bring those that are not.

``install`` ends with 0 when the servers are there, 1 when one is missing in CI.  Outside
CI a missing server is told and ends with 0: its tests will say that they are skipped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lockkit_tools.servers.errors import ServerMissing
from lockkit_tools.servers.install import install
from lockkit_tools.servers.kinds import KINDS, Kind, find_kind
from lockkit_tools.servers.provisioning import in_ci, look


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand and gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lockkit_tools.servers", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="show where each kind of server comes from")
    bring = commands.add_parser("install", help="install what is missing (on Debian, as root)")
    bring.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parsed = parser.parse_args(arguments)
    if parsed.command == "list":
        return show_list()
    try:
        kinds = [find_kind(name) for name in parsed.kinds or KINDS]
    except ValueError as error:
        bring.error(str(error))
    return bring_in(kinds)


def show_list() -> int:
    """Prints one line for each kind."""
    width = max(map(len, KINDS))
    for kind in KINDS.values():
        source = look(kind)
        where = f"{source.origin}: {source.detail}" if source else missing_text(kind)
        tell(f"{kind.name:{width}}  {where}")
    return 0


def bring_in(kinds: Sequence[Kind]) -> int:
    """Makes sure that the kinds are here, telling what was done."""
    status = 0
    for kind in kinds:
        if (source := look(kind)) is not None:
            tell(f"{kind.name}: {source.origin}, {source.detail}")
            continue
        try:
            install([kind], tell=tell)
        except ServerMissing as error:
            tell(f"{kind.name}: {error}")
            status = 1 if in_ci() else status
        else:
            tell(f"{kind.name}: {', '.join(kind.locations())}")
    return status


def missing_text(kind: Kind) -> str:
    """What to do for a kind that is not here."""
    if kind.factory is None:
        return f"not here; set {kind.variable} or run Docker"
    return f"not here; 'install {kind.name}' brings Debian's {' '.join(kind.packages)}"


def tell(line: str) -> None:
    """Prints a line at once, also into a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
