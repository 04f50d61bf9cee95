"""The process of a `lockkit.testing.processes.Worker`: takes orders from a pipe, one after the other."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any

from lockkit import aio
from lockkit.engine import engine
from lockkit.errors import ConfigurationError, LockError, LockLost
from lockkit.testing.face_driver import DRIVERS, BackgroundCall, FaceDriver
from lockkit.testing.history import recorded
from lockkit.testing.processes import PIPE
from lockkit.testing.timing import PATIENCE
from lockkit.testing.witness import Witness
from lockkit.units import Seconds

_HOUR = 3600.0  # without limit: the other side knows how long it is willing to wait


class Orders:
    """What a worker can be told to do; each public method is an order, its parameters are the arguments."""

    def __init__(self, driver: FaceDriver, client: aio.Client, pipe: Connection) -> None:
        self._driver = driver
        self._client = client
        self._pipe = pipe
        self._leases: list[aio.Lease] = []
        self._acquiring: list[BackgroundCall[aio.Lease]] = []

    async def serve(self, until: str) -> None:
        """Carry out orders, until the order `until` comes."""
        while True:
            what, arguments = await self._driver.call(self._pipe.recv)
            if what == until:
                return
            order: Callable[..., Coroutine[Any, Any, Any]] = getattr(self, what)
            await self.answer(order(**arguments))

    async def answer(self, doing: Coroutine[Any, Any, Any]) -> None:
        """Do it and send what it returned or raised."""
        error: object = None
        result = None
        try:
            result = await doing
        except LockError as raised:
            error = raised
        except Exception:  # noqa: BLE001 - shown on the other side
            error = traceback.format_exc()
        self._pipe.send((error, result))

    def _keep(self, lease: aio.Lease) -> tuple[int, str, int]:
        self._leases.append(lease)
        return len(self._leases) - 1, lease.owner, lease.token

    async def acquire(self, name: str, wait: Seconds | None, lock: dict[str, Any]) -> tuple[int, str, int]:
        """Acquire a lock."""
        return self._keep(await self._client.lock(name, **lock).acquire(wait))

    async def start_acquire(self, name: str, lock: dict[str, Any]) -> None:
        """Begin to acquire a lock, and return when that waits."""
        self._acquiring.append(self._driver.spawn(self._client.lock(name, **lock).acquire()))
        await self._driver.until_waiting(self._client, name)

    async def finish_acquire(self) -> tuple[int, str, int]:
        """Wait for what `start_acquire` began."""
        return self._keep(await self._acquiring.pop(0).result(_HOUR))

    async def enter(self, name: str, lock: dict[str, Any]) -> None:
        """Enter a ``with`` block, whose body goes on taking orders until ``leave``."""
        async with self._client.lock(name, **lock) as lease:
            self._pipe.send((None, self._keep(lease)))
            await self.serve("leave")

    async def release(self, number: int) -> None:
        """Release a lease."""
        await self._leases[number].release()

    async def check(self, number: int) -> None:
        """Check a lease."""
        self._leases[number].check()

    async def held(self, number: int) -> bool:
        """Tell whether a lease is held."""
        return self._leases[number].held

    async def confirm(self, number: int) -> bool:
        """Ask the backend about a lease."""
        return await self._leases[number].confirm()

    async def hammer(
        self, *, name: str, rounds: int, seconds: float, directory: str, who: str, lock: dict[str, Any]
    ) -> int:
        """Enter a watched critical section, so often and for so long; tell how often it was."""
        witness = Witness(directory)
        until, number = time.monotonic() + seconds, 0
        while number < rounds or time.monotonic() < until:
            async with recorded(int(who.removeprefix("process")), self._client.lock(name, **lock)) as lease:
                witness.enter(who, lease.token)
                # Sometimes long enough for the others to run into it.
                await self._driver.sleep(0.001 if number % 4 == 0 else 0)
                witness.leave(who, lease.token)
            number += 1
        return number

    async def fork(self, number: int, name: str) -> dict[str, object]:
        """Fork, and tell what the child found (see `_as_child`)."""
        lease = self._leases[number]
        readable, writable = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 and later warn of forking with threads: this is about what happens then.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            status = 1
            try:
                found = self._driver.run_bare(self._as_child(lease, name))
                os.write(writable, pickle.dumps(found))
                status = 0
            except BaseException:  # noqa: BLE001 - nothing may run on in the copy of this program
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writable)
        with open(readable, "rb") as pipe:  # noqa: PTH123, ASYNC230 - a descriptor; the child is short
            found_there = await self._driver.call(pipe.read)
        await self._driver.call(os.waitpid, pid, 0)
        report: dict[str, object] = pickle.loads(found_there)  # noqa: S301 - our own child's
        return report

    async def _as_child(self, lease: aio.Lease, name: str) -> dict[str, object]:
        """What a forked child sees of its parent's lease, and whether it can work with the client."""
        seen: dict[str, object] = {"held": lease.held, "lost": lease.lost}
        for what, attempt in (("check", self._check), ("release", lambda held: held.release())):
            try:
                await attempt(lease)
                seen[what] = None
            except LockLost:
                seen[what] = "LockLost"
        try:
            seen.update(await self._use_as_child(lease.name, name))
        except ConfigurationError as error:
            seen["refused"] = str(error)
        await self._client.close()
        return seen

    async def _use_as_child(self, parents: str, name: str) -> dict[str, object]:
        seen: dict[str, object] = {}
        seen["owners"] = [holder.owner for holder in await self._client.holders(parents)]
        seen["parents_lock"] = await self._driver.answered(self._client.lock(parents).try_acquire) is not None
        own = await self._client.lock(name).acquire(PATIENCE)
        seen["own_owners"] = [holder.owner for holder in await self._client.holders(name)] == [own.owner]
        await own.release()
        return seen

    @staticmethod
    async def _check(lease: aio.Lease) -> None:
        lease.check()


async def main(driver: FaceDriver, pipe: Connection, options: dict[str, Any], known: set[str]) -> Orders:
    """Connect, say so and which modules that took, and take orders until told to exit. Give the orders back."""
    orders = Orders(driver, driver.make_client(**options), pipe)
    pipe.send((None, [module for module in sys.modules if module not in known]))
    engine.EXIT_SECONDS = PATIENCE  # the machine may stand still while the exit releases
    try:
        await orders.serve("exit")
    except EOFError:
        os._exit(0)  # the other side has ended: release nothing in its place
    return orders


def run() -> Orders:
    """
    Do what a `Worker` says. Called in a process forked by `lockkit.testing.fork_servers`.

    Returns:
        What is to be referenced until the interpreter exits: its leases are held then, and not dropped before.
    """
    known = set(sys.modules)
    pipe = Connection(PIPE)
    # First of all: what comes next may only be understood with modules from there.
    path, variables, directory = pipe.recv()
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    target, face, options = pipe.recv()
    with target.connect() as asked:
        driver = DRIVERS[face](target, asked.capabilities)
    return driver.run_bare(main(driver, pipe, options, known))
