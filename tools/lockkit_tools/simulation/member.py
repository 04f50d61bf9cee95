"""One client of a random schedule: its process, what is done to it, and what the history says about it."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from typing import Any

from lockkit.aio import Client
from lockkit.engine.lease_record import LeaseRecord
from lockkit.errors import LockError
from lockkit_tools.simulation.history import Believed, Closed, Crashed, History, Paused, Resumed, Unheld
from lockkit_tools.simulation.schedule import Fault, Schedule
from lockkit_tools.simulation.server import Storage
from lockkit_tools.simulation.world import Process, Task


class Member:
    """One client: its process, its workers, and what the history says about it."""

    def __init__(
        self,
        schedule: Schedule,
        index: int,
        process: Process,
        client: Client,
        *,
        storage: Storage,
        history: History,
        calls: Iterator[int],
    ) -> None:
        self.schedule = schedule
        self.index = index
        self.process = process
        self.process.probe = self._probe
        self.client = client
        self.storage = storage
        self.world = process.world
        self.history = history
        self.calls = calls
        self.closed = False
        self.exiting = False
        self._watched: dict[LeaseRecord, tuple[float, str]] = {}

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> Task[Any]:
        """Run something in the client's process."""
        return self.process.start(coroutine, name)

    # -- what is done to it ----------------------------------------------------------------------------------------

    def suffer(self, fault: Fault) -> None:
        """Have a fault of the schedule done to it."""
        if fault.kind == "pause":
            self.pause(fault.seconds)
        elif fault.kind == "crash":
            self.crash()
        elif fault.kind == "exit":
            self.exit()
        elif fault.kind == "close":
            self.start(self.close(calm=False), "close")
        elif fault.kind == "cut close":
            # Close the client, and be cancelled on the way; somebody closes it again later.
            closing = self.process.start(self.client.close(), "close", awaited=True)
            self.world.call_in(fault.variant * self.schedule.call_timeout, closing.cancel)
        elif fault.kind == "no threads":
            self.process.refuses_tasks = True
            self.world.call_in(fault.seconds, self._allow_tasks)
        else:
            assert fault.kind == "break", fault
            self.start(self.break_lock(), "break")

    def pause(self, seconds: float) -> None:
        """Stop the process for a while."""
        if not self.process.dead and not self.process.paused:
            self.process.pause()
            self.history.append(Paused(self.world.now, self.process.name))
            self.world.call_in(seconds, self.resume)

    def resume(self) -> None:
        """Let it go on."""
        if self.process.paused and not self.process.dead:
            self.process.resume()
            self.history.append(Resumed(self.world.now, self.process.name))

    def crash(self) -> None:
        """Kill the process."""
        if not self.process.dead:
            self.history.append(Crashed(self.world.now, self.process.name))
            self.process.crash()

    def exit(self) -> None:
        """End it as an event loop ends: all tasks are cancelled and may clean up, then it is gone."""
        self.exiting = True
        for task in list(self.process.tasks.values()):
            task.cancel()
        # A body that cleans up may take longer than its ttl.
        self.world.call_in(4 * self.schedule.ttl + 1.0, self.crash)

    async def close(self, *, calm: bool) -> None:
        """Close the client."""
        if not self.closed:
            self.closed = True
            await self.client.close()
            self.history.append(Closed(self.world.now, self.process.name, calm))

    def _allow_tasks(self) -> None:
        self.process.refuses_tasks = False

    async def leave(self) -> None:
        """Close the client at the end, if there is one."""
        if not self.process.dead:
            await self.start(self.close(calm=True), "close").join()

    async def break_lock(self) -> None:
        """Free a lock by force, whoever holds it."""
        try:
            await self.client.break_lock(self.schedule.names[0])
        except LockError:
            return  # no answer, or the client is closed

    # -- what it believes ------------------------------------------------------------------------------------------

    def watch(self, record: LeaseRecord) -> None:
        """Take down from now on what the client believes about a lease."""
        self._watched[record] = record.valid_until, ""

    def _probe(self) -> None:
        """
        Look at what the client believes after each of its steps.

        At the fields: asking the lease would make it notice its loss.
        """
        for record, (valid_until, why_before) in self._watched.items():
            why = record.lost_reason or ("released" if record.released else "")
            if (record.valid_until, why) == (valid_until, why_before):
                continue
            self._watched[record] = record.valid_until, why
            if record.valid_until != valid_until:
                until = self.process.clock.true_time(record.valid_until)
                self.history.append(Believed(self.world.now, record.grant.owner, until))
            if why != why_before:
                self.history.append(Unheld(self.world.now, record.grant.owner, why))
