"""``lockkit demo``: several processes sell the same seats, first without a lock and then with one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
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
                # Not the configured default or scope: the demo uses no production server unless you name it.
                url = f"file://{quote(str(Path(directory, 'locks')))}?scope=machine"
            with connected(self, profiles.resolve(url, self.profile, {})) as client:
                client.ping()
                backend = client.url
            office = BoxOffice(directory, self.seats)
            rounds = [_round(office, lock_at, self.processes) for lock_at in (None, (url, self.profile))]
            ok = is_right(office.sales(), self.seats)  # of the second round
        whole: dict[str, Any] = {"backend": backend, "seats": self.seats, "processes": self.processes}
        if self.as_json:
            print_json({**whole, "rounds": [one._asdict() for one in rounds], "ok": ok})
        else:
            _print(*rounds, **whole, ok=ok)
        return Status.OK if ok else Status.FAILED


# -- selling -----------------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """What came of one round, as ``--json`` has it."""

    lock: bool  # sold under the lock
    tickets: int
    seats_sold: int
    sold_again: int  # tickets for a seat that somebody has already
    tickets_by_seller: list[int]
    tokens: dict[str, Any] | None  # the first, the last, and whether they increase
    seconds: float


def count(sales: Sequence[Sale], processes: int, seconds: float, *, locked: bool) -> Round:
    """Count the tickets of a round, given in the order in which they were sold."""
    sold, sellers = len({sale.seat for sale in sales}), [sale.seller for sale in sales]
    tokens = [sale.token for sale in sales if sale.token is not None]
    increasing = all(earlier < later for earlier, later in pairwise(tokens))
    about = {"first": tokens[0], "last": tokens[-1], "increasing": increasing} if tokens else None
    by_seller = [sellers.count(seller) for seller in range(processes)]
    return Round(locked, len(sales), sold, len(sales) - sold, by_seller, about, round(seconds, 3))


def is_right(sales: Sequence[Sale], seats: int) -> bool:
    """Tell whether every seat was sold once, under a lease of its own, and by tokens in the right order."""
    tokens = [0 if sale.token is None else sale.token for sale in sales]
    in_order = all(earlier < later for earlier, later in pairwise([0, *tokens]))
    return {sale.seat for sale in sales} == set(range(1, seats + 1)) and len(sales) == seats and in_order


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
    return count(office.sales(), processes, seconds, locked=lock_at is not None)


# -- showing -----------------------------------------------------------------------------------------------------------


def _print(without: Round, locked: Round, *, backend: str, seats: int, processes: int, ok: bool) -> None:
    rounds = (without, locked)
    table = Table("", "without a lock", "with a lock")
    table.add_row("tickets sold", *(str(one.tickets) for one in rounds))
    table.add_row("different seats", *(f"{one.seats_sold} of {seats}" for one in rounds))
    table.add_row("seats sold again", *(str(one.sold_again) for one in rounds))
    table.add_row("tickets by each process", *(", ".join(map(str, one.tickets_by_seller)) for one in rounds))
    table.add_row("fencing tokens", *(_tokens(one) for one in rounds))
    table.add_row("seconds", *(f"{one.seconds:.2f}" for one in rounds))
    Console().print(table)
    print(f"{processes} processes, {seats} seats, lock at {backend}")
    if ok:
        print(f"Without a lock, {without.sold_again} tickets were for seats already sold; with a lock, none.")
    else:
        print("THE LOCK DID NOT HOLD: a seat was sold again or not at all, or the tokens did not increase.")


def _tokens(one: Round) -> str:
    if one.tokens is None:
        return "none"
    order = "increasing" if one.tokens["increasing"] else "NOT increasing"
    return f"{order}\n{one.tokens['first']}\n… {one.tokens['last']}"
