"""
Three workers of the site start at the same time; each migrates, then three customers want the same seat.

Run it: ``python examples/django_site/demo.py``. ``DATABASE_URL`` (PostgreSQL) and ``SHOP_LOCKS`` name servers.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

MANAGE = [sys.executable, str(Path(__file__).with_name("manage.py"))]
CUSTOMERS = ["Ada", "Ben", "Cem"]


def together(commands: list[list[str]], environment: dict[str, str]) -> list[int]:
    """Run all at the same time, and return their statuses in order."""
    processes = [
        subprocess.Popen([*MANAGE, *command], env=environment, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    for command, process in zip(commands, processes, strict=True):
        out, _ = process.communicate()
        print(f"{' '.join(command)}: {' / '.join(out.split(chr(10))[-2:-1]).strip()}, status {process.returncode}")
    return sorted(process.returncode for process in processes)


def main() -> int:
    """Migrate, then sell one seat."""
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "SHOP_DATA": os.environ.get("SHOP_DATA", directory)}
        migrated = together([["migrate_locked"] for _ in CUSTOMERS], environment)
        bought = together([["buy", "12A", customer] for customer in CUSTOMERS], environment)
    return int(migrated != [0, 0, 0] or bought != [0, 1, 1])


if __name__ == "__main__":
    sys.exit(main())
