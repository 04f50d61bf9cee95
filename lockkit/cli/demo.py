"""``lockkit demo``: several processes sell the same seats, first without a lock and then with one."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

import lockkit
from lockkit.cli.output import print_json, refuse_private, say
from lockkit.cli.seller import WAIT_MAX, BoxOffice, Failure, Plan, Sale, sell
from lockkit.cli.status import Status

Show = Callable[[list[Sale]], None]
"""Called with the tickets sold since the last call."""

LOOK_EVERY = 0.05
"""Seconds between two looks at the ledger. Shorter is smoother, but takes time from the sellers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
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


def demo(url: str | None, profile: str | None, *, seats: int, processes: int, as_json: bool) -> int:
    """Sell the seats without and with a lock, and show the results."""
    with tempfile.TemporaryDirectory(prefix="lockkit-demo-") as temporary:
        directory = Path(temporary)
        if url is None and profile is None:
            # Not the configured default: the demo uses no production server unless you name it.
            url = f"file://{quote(str(directory / 'locks'))}"
        with lockkit.connect(url, profile=profile) as client:
            refuse_private(client)
            client.ping()
            backend = client.url
        console = Console()
        with _progress(console, hidden=as_json) as progress:
            tasks = [
                progress.add_task(f"{text:<14}", total=seats, note="") for text in ("without a lock", "with a lock")
            ]
            rounds = []
            for locked, task in zip((False, True), tasks, strict=True):
                plan = Plan(directory=temporary, seller=0, seats=seats, locked=locked, url=url, profile=profile)
                rounds.append(_round(plan, processes, partial(_advance, progress, task)))
    ok = rounds[-1].right
    if as_json:
        counts = [one.as_dict(processes) for one in rounds]
        print_json({"backend": backend, "seats": seats, "processes": processes, "rounds": counts, "ok": ok})
    else:
        _print(console, backend, rounds, processes)
    return Status.OK if ok else Status.FAILED


# -- selling -----------------------------------------------------------------------------------------------------------

_SPAWN = multiprocessing.get_context("spawn")


def _round(plan: Plan, processes: int, show: Show) -> Round:
    """Let all sellers sell at once."""
    office = BoxOffice(Path(plan.directory))
    office.open(plan.seats)
    os.environ["PYTHONSAFEPATH"] = "1"  # the sellers import nothing from the working directory
    ready, failures = _SPAWN.Barrier(processes + 1), _SPAWN.SimpleQueue()
    # The sellers inherit it: Ctrl-C is for the demo, which ends them all.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for number in range(processes):
            args = dataclasses.replace(plan, seller=number), ready, failures
            _SPAWN.Process(target=sell, args=args, daemon=True).start()
        sellers = multiprocessing.active_children()
        signal.signal(signal.SIGINT, handler)
        with suppress(BrokenBarrierError):  # one has failed
            ready.wait(WAIT_MAX)
        began = time.monotonic()
        sales = _follow(office, sellers, show)
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
    return Round(plan.locked, plan.seats, sales, seconds)


def _follow(office: BoxOffice, sellers: Sequence[BaseProcess], show: Show) -> list[Sale]:
    """Watch the ledger until all sellers have ended."""
    sales: list[Sale] = []
    offset = 0
    running = True
    while running:
        running = any(seller.is_alive() for seller in sellers)
        new, offset = office.sales(offset)
        sales += new
        show(new)
        if running:
            time.sleep(LOOK_EVERY)
    return sales


# -- showing -----------------------------------------------------------------------------------------------------------


def _progress(console: Console, *, hidden: bool) -> Progress:
    """Make a bar for each round."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tickets  {task.fields[note]}"),
        console=console,
        disable=hidden or not console.is_terminal,
    )


def _advance(progress: Progress, task: TaskID, sales: list[Sale]) -> None:
    """Show new tickets."""
    progress.advance(task, len(sales))
    if sales and sales[-1].token is not None:
        progress.update(task, note=f"token {sales[-1].token}")


def _print(console: Console, backend: str, rounds: list[Round], processes: int) -> None:
    without, locked = rounds
    table = Table("", "without a lock", "with a lock")
    table.add_row("tickets sold", *(str(len(one.sales)) for one in rounds))
    table.add_row("different seats", *(f"{one.seats_sold} of {one.seats}" for one in rounds))
    table.add_row("seats sold again", *(str(one.sold_again) for one in rounds))
    table.add_row("tickets by each process", *(", ".join(map(str, one.by_seller(processes))) for one in rounds))
    table.add_row("fencing tokens", *(_tokens(one) for one in rounds))
    table.add_row("seconds", *(f"{one.seconds:.2f}" for one in rounds))
    console.print(table)
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
