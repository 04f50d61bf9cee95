"""
Three tills sell from one stock of ten. They sell ten, and the stock never falls below zero.

    LOCKKIT_URL=redis://localhost:6379/0 python examples/stock_decrease.py
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import lockkit

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

STOCK = 10
ORDERS_PER_TILL = 5
TILLS = 3


def till(directory: Path, number: int, opening: Barrier) -> None:
    """Take orders: one till's process. The stock is a file, which can neither lock nor compare by itself."""
    with lockkit.connect() as client:

        @client.lock("stock:{product}", ttl=10, timeout=60)
        def sell(product: str) -> bool:
            """Take one from the stock, if there is one. Nobody else reads or writes it meanwhile."""
            file = directory / product
            left = int(file.read_text())
            if left == 0:
                return False
            file.write_text(str(left - 1))
            return True

        opening.wait(60)
        sold = sum(sell("apples") for _ in range(ORDERS_PER_TILL))
        (directory / f"till {number}").write_text(str(sold))


def main() -> int:
    """Let all tills sell at the same time, and add up."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "apples").write_text(str(STOCK))

        spawn = multiprocessing.get_context("spawn")
        opening = spawn.Barrier(TILLS)
        tills = [spawn.Process(target=till, args=(directory, number, opening)) for number in range(TILLS)]
        for process in tills:
            process.start()
        for process in tills:
            process.join()

        if any(process.exitcode for process in tills):
            return 1
        sold = [int(file.read_text()) for file in sorted(directory.glob("till *"))]
        left = int((directory / "apples").read_text())
    print(f"{sum(sold)} sold by {len(sold)} tills, {left} left of {STOCK}")
    return 0 if sum(sold) == STOCK and left == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
