"""``lockkit demo``: several processes sell the same seats, first without a lock and then with one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, NamedTuple
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table

from lockkit.cli.app import JSON, PROFILE, command, option
from lockkit.cli.output import connected, print_json, say
from lockkit.cli.seller import WAIT_MAX, BoxOffice, Failure, Sale, sell
from lockkit.cli.status import Status
from lockkit.configuration import profiles

_SPAWN = multiprocessing.get_context("spawn")


@command("demo", "Sell seats with several processes, without a lock and with one.")
class Demo:
    """
    Sell seats with several processes, without a lock and with one.

    The number of free seats is in a plain file, which each process reads and, after a pause, writes. Exit status 1 if
    a seat was sold twice under the lock.
    """

    url: str | None = option(
        None, "Backend of the lock. Default: files in a temporary directory.", "--url", metavar="URL"
    )
    profile: str | None = PROFILE
    seats: int = option(100, "Seats to sell.", metavar="N", min=1, max=100_000)
    processes: int = option(8, "Processes that sell.", metavar="N", min=2, max=64)
    as_json: bool = JSON

    def run(self) -> Status:
        with tempfile.TemporaryDirectory(prefix="lockkit-demo-") as directory:
            url = self.url
            if url is None and self.profile is None:
                # Not the configured default: the demo uses no production server unless you name it.
                url = f"file://{quote(str(Path(directory, 'locks')))}"
            with connected(self, profiles.resolve(url, self.profile, {})) as client:
                client.ping()
                backend = client.url
            office = BoxOffice(directory, self.seats)
            rounds = [_round(office, lock_at, self.processes) for lock_at in (None, (url, self.profile))]
        ok = rounds[-1].right
        if self.as_json:
            counts = [one.as_dict(self.processes) for one in rounds]
            whole = {"backend": backend, "seats": self.seats, "processes": self.processes, "rounds": counts, "ok": ok}
            print_json(whole)
        else:
            _print(backend, rounds, self.processes)
        return Status.OK if ok else Status.FAILED


# -- selling -----------------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """All tickets of one round, in the order in which they were sold."""

    locked: bool  # sold under the lock
    seats: int  # how many there were
    sales: list[Sale]  # the tickets
    seconds: float  # how long it took

    @property
    def seats_sold(self) -> int:
        return len({sale.seat for sale in self.sales})

    @property
    def sold_again(self) -> int:
        """How many tickets were sold for a seat that somebody has already."""
        return len(self.sales) - self.seats_sold

    @property
    def tokens(self) -> list[int]:
        return [sale.token for sale in self.sales if sale.token is not None]

    @property
    def increasing(self) -> bool:
        return all(earlier < later for earlier, later in pairwise(self.tokens))

    @property
    def right(self) -> bool:
        """Every seat was sold once, under a lease of its own, and by tokens in the right order."""
        once = self.seats_sold == len(self.sales) == self.seats
        return once and len(self.tokens) == self.seats and self.increasing

    def by_seller(self, processes: int) -> list[int]:
        sellers = [sale.seller for sale in self.sales]
        return [sellers.count(seller) for seller in range(processes)]

    def as_dict(self, processes: int) -> dict[str, Any]:
        tokens = self.tokens
        return {
            "lock": self.locked,
            "tickets": len(self.sales),
            "seats_sold": self.seats_sold,
            "sold_again": self.sold_again,
            "tickets_by_seller": self.by_seller(processes),
            "tokens": {"first": tokens[0], "last": tokens[-1], "increasing": self.increasing} if tokens else None,
            "seconds": round(self.seconds, 3),
        }


def _round(office: BoxOffice, lock_at: tuple[str | None, str | None] | None, processes: int) -> Round:
    """Let all sellers sell at once."""
    office.open()
    os.environ["PYTHONSAFEPATH"] = "1"  # the sellers import nothing from the working directory
    ready, failures = _SPAWN.Barrier(processes + 1), _SPAWN.SimpleQueue()
    # The sellers inherit it: Ctrl-C is for the demo, which ends them all.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for number in range(processes):
            _SPAWN.Process(target=sell, args=(office, number, lock_at, ready, failures), daemon=True).start()
        sellers = multiprocessing.active_children()
        signal.signal(signal.SIGINT, handler)
        with suppress(BrokenBarrierError):  # one has failed
            ready.wait(WAIT_MAX)
        began = time.monotonic()
        for seller in sellers:
            seller.join()
        seconds = time.monotonic() - began
    finally:
        signal.signal(signal.SIGINT, handler)
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
    failed: set[Failure] = {(Status.FAILED, f"status {seller.exitcode}") for seller in sellers if seller.exitcode}
    while not failures.empty():
        failed.add(failures.get())
    for status, text in sorted(failed):
        say(f"a seller ended with {status}: {text}")
    if failed:
        raise typer.Exit(max(failed)[0])
    return Round(lock_at is not None, office.seats, office.sales(), seconds)


# -- showing -----------------------------------------------------------------------------------------------------------


def _print(backend: str, rounds: list[Round], processes: int) -> None:
    without, locked = rounds
    table = Table("", "without a lock", "with a lock")
    table.add_row("tickets sold", *(str(len(one.sales)) for one in rounds))
    table.add_row("different seats", *(f"{one.seats_sold} of {one.seats}" for one in rounds))
    table.add_row("seats sold again", *(str(one.sold_again) for one in rounds))
    table.add_row("tickets by each process", *(", ".join(map(str, one.by_seller(processes))) for one in rounds))
    table.add_row("fencing tokens", *(_tokens(one) for one in rounds))
    table.add_row("seconds", *(f"{one.seconds:.2f}" for one in rounds))
    Console().print(table)
    print(f"{processes} processes, {locked.seats} seats, lock at {backend}")
    if locked.right:
        print(f"Without a lock, {without.sold_again} tickets were for seats already sold; with a lock, none.")
    else:
        print("THE LOCK DID NOT HOLD: a seat was sold again or not at all, or the tokens did not increase.")


def _tokens(one: Round) -> str:
    if not one.tokens:
        return "none"
    order = "increasing" if one.increasing else "NOT increasing"
    return f"{order}\n{one.tokens[0]}\n… {one.tokens[-1]}"
