"""``python -m box_office SEAT CUSTOMER``: sell one ticket, in the environment that LOCKKIT_ENV names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lockkit
from box_office.sales import BoxOffice, SoldOut
from box_office.store import SqliteStore


def main(seat: str, customer: str) -> int:
    """Sell it, and say so."""
    store = SqliteStore(Path(os.environ["BOX_OFFICE_DATA"]) / "sales.db")
    with lockkit.connect() as client:
        try:
            token = BoxOffice(client, store).book(seat, customer)
        except SoldOut:
            print(f"{seat} is sold")
            return 1
    print(f"{seat} for {customer}, ticket {token}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
