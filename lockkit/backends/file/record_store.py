"""
The records of a lock directory, and every operation on one of them, under its flock.

Here is also what becomes of records that are damaged, of another version, or from before a reboot.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from math import inf
from typing import TYPE_CHECKING, TypeVar

from lockkit.backend import seconds_left
from lockkit.backends.file.clients import live_ttl_max
from lockkit.backends.file.directory import Directory, explain, record_name
from lockkit.backends.file.record import DamagedError, FileClaim, RemovedError, VersionError
from lockkit.backends.file.record_file import RecordFile, make_record, open_record, who_flocked
from lockkit.backends.lock_state import Ledger
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.validation import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockkit.backends.file.client_file import Presence
    from lockkit.runtime import Runtime

    Change = Callable[[Ledger[FileClaim], float, "A"], "T"]

__all__ = ["Store"]

log = logging.getLogger("lockkit")

T = TypeVar("T")
A = TypeVar("A")

OPEN_RECORDS_MAX = 64
"""Record files that a client keeps open. More saves opening them again (4 µs), fewer saves descriptors."""

FLOCK_SPINS = 16
"""Tries without a pause: together about as long as a flock is held, where a pause would take ten times as long."""

FLOCK_PAUSE_MIN = 0.00005
FLOCK_PAUSE_MAX = 0.005
"""Pauses between further tries, seconds. They grow in case its holder is not running."""

DAMAGED = "damaged"
"""Owner in a record that was found damaged, until all leases that may have stood there have run out."""


class Store:
    """
    The records, and which of them are open.

    Attributes:
        held: Owner and end of the lease of every lock that this client holds, by name.
    """

    def __init__(self, runtime: Runtime, directory: Directory, presence: Presence, url: str) -> None:
        """Open nothing yet."""
        self._runtime = runtime
        self._now = runtime.now
        self._directory = directory
        self._presence = presence
        self._url = url
        self._warnings: deque[tuple[str, str, str, float]] = deque()
        self.clear()

    def clear(self) -> None:
        """Close everything and begin anew. Where nobody else is: at the end, or in a forked child."""
        for file in getattr(self, "files", {}).values():
            file.close()
        self._mutex = threading.Lock()  # a real one, also under asyncio: it is never held across an await
        self.files: dict[str, RecordFile] = {}
        self.held: dict[str, tuple[str, float]] = {}

    def reopen(self) -> None:
        """Have all records opened again: the directory may not be the one that it was."""
        with self._mutex:
            files, self.files = self.files, {}
        for file in files.values():
            with file.mutex:
                file.close()

    def let_go(self, name: str, owner: str) -> None:
        """Forget that this client holds a lock, if it does so under this owner."""
        held = self.held.get(name)
        if held is not None and held[0] == owner:
            del self.held[name]

    # -- one operation on one record -------------------------------------------------------------------------------

    def quick(self, name: str, change: Change[A, T], argument: A) -> T | None:
        """Do what `transact` does if the record is open and nobody else is at it, else return None."""
        file = self.files.get(name)
        now = self._now()
        if file is None or now >= self._presence.check_at:
            return None
        try:
            return file.apply(change, now, argument, self._load)
        except (OSError, RemovedError, LockError):
            return None  # transact will see it too, if it lasts
        finally:
            if self._warnings:
                self._warn()

    async def transact(
        self,
        name: str,
        change: Change[A, T],
        argument: A,
        *,
        create: bool,
        forced: bool = False,
        answer_by: float = inf,
    ) -> T:
        """
        Let `change` look at the ledger of a lock and alter it, under the flock of its record.

        Args:
            name: The lock.
            change: Called with the ledger, the time, and `argument`. Does not wait.
            argument: For `change`.
            create: Make the record if there is none. Otherwise `change` gets a free ledger that is not kept.
            forced: Also while the record is held back because it was damaged.
            answer_by: When to give up if another process has the record flocked.

        Raises:
            BackendUnavailable: Disk full, record damaged, flock not to be had.
            ConfigurationError: It can never work like this.
        """
        patience: _Patience | None = None
        now = 0.0
        while True:
            try:
                now = self._presence.enter()
                file = self.files.get(name)
                if file is not None:
                    return file.apply(change, now, argument, self._load, forced)
                if not self._open(name, create=create):
                    return change(Ledger(), now, argument)
            except RemovedError:
                self._drop(name)
            except BlockingIOError:
                patience = patience or _Patience(self._runtime, now, answer_by)
                if not await patience.wait(now):
                    message = _stuck(self._path(name), now - patience.began)
                    raise self.about(BackendUnavailable(message), name) from None
            except LockError as error:
                self.about(error, name)
                raise  # not explained once more: BackendUnavailable is an OSError too
            except OSError as error:
                raise self.about(explain(error, self._path(name)), name) from error
            finally:
                if self._warnings:
                    self._warn()

    def _warn(self) -> None:
        """Log what was noticed under mutex and flock: a handler may be slow, or use a lock of this client."""
        while self._warnings:
            log.warning(*self._warnings.popleft())

    def about(self, error: LockError, name: str | None) -> LockError:
        """Note which lock and which backend an error is about."""
        error.name, error.backend = name, self._url
        return error

    def peek(self, name: str) -> Ledger[FileClaim] | None:
        """Look at an open record without its flock: a hint. None if it cannot be had."""
        file = self.files.get(name)
        return None if file is None else file.peek()

    def _load(self, file: RecordFile, text: bytes, now: float, forced: bool) -> Ledger[FileClaim]:  # noqa: FBT001
        """Parse a record; mend it if it is damaged."""
        try:
            ledger, boot = file.parse(text)
        except VersionError as error:
            message = (
                f"{file.path} was written by another version of lockkit (record version {error}): "
                "use that version, or remove the file when nobody uses the lock"
            )
            raise ConfigurationError(message) from error
        except DamagedError as error:
            ledger, boot = self._mend(file, error, now, forced=forced), file.boot
        if boot != file.boot:
            self._after_boot(file, ledger)
        holder = ledger.holder
        if holder is not None and not holder.client and now < ledger.until and not forced:
            message = (
                f"the record {file.path} was damaged; nobody gets this lock for another {ledger.until - now:.1f} s, "
                f"until all leases that it may have held have run out. To free it now: lockkit break {shown(file.name)}"
            )
            raise BackendUnavailable(message)
        return ledger

    def _mend(self, file: RecordFile, error: DamagedError, now: float, *, forced: bool) -> Ledger[FileClaim]:
        """
        Replace a damaged record by one that lets nobody in while an old lease may live.

        The token then starts at the time floor, above all that was given before.
        """
        # With `forced` any time will do: the lock is about to be freed.
        until = now + 1.0 if forced else self._damage_until(file, error, now)
        ledger: Ledger[FileClaim] = Ledger()
        if until > now:
            ledger.holder = FileClaim(DAMAGED, 0.0, "", '{"text":"the record was damaged"}')
            ledger.until = until
        file.replace(ledger)
        return ledger

    def _damage_until(self, file: RecordFile, error: DamagedError, now: float) -> float:
        """When the last lease that may have stood in a damaged record has run out; `now` if there can be none."""
        client = self._presence.client
        assert client is not None
        try:
            ttl = live_ttl_max(self._directory, but=client.id)
        except ValueError as unknown:
            message = (
                f"the record {file.path} is damaged ({error}), and nobody can tell when its lease ends ({unknown})."
                f" If nobody holds the lock: lockkit break {shown(file.name)}"
            )
            raise BackendUnavailable(message) from error
        _, ours = self.held.get(file.name, ("", 0.0))
        until = max(now + ttl, ours)
        warning = "the record %s is damaged (%s); the lock is free in %.1f s", file.path, str(error), until - now
        self._warnings.append(warning)
        return until

    def _after_boot(self, file: RecordFile, ledger: Ledger[FileClaim]) -> None:
        """Free a lock that was held when the machine was shut down."""
        for claim in (*([ledger.holder] if ledger.holder else ()), *ledger.queue):
            if claim.client and not self._presence.dead(claim):
                message = (
                    f"{file.path} is in use under another kernel or time namespace: its times mean nothing here. "
                    "Name a directory that only this machine uses, or use a backend for several machines"
                )
                raise ConfigurationError(message)
        ledger.holder = None
        ledger.queue.clear()

    # -- open records ----------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self._directory.path}/{record_name(name)[1]}"

    def _open(self, name: str, *, create: bool) -> bool:
        """Open a record, and close another if there are too many; False if there is none and none is to be made."""
        escaped, file_name = record_name(name)
        path = f"{self._directory.path}/{file_name}"
        with self._mutex:
            if name in self.files:
                return True
            try:
                fd = open_record(path)
            except FileNotFoundError:
                if not create:
                    return False
                make_record(self._directory, path, escaped, self._runtime.owner())
                fd = open_record(path)
            self.files[name] = RecordFile(fd, name, escaped, path, group=self._directory.group)
            # The directory may be another than when we looked last, without our client file.
            self._presence.suspect()
            if len(self.files) > OPEN_RECORDS_MAX:
                self._make_room()
        return True

    def _make_room(self) -> None:
        """Close the record that was opened first, unless it is in use."""
        for name, file in self.files.items():
            if file.mutex.acquire(blocking=False):
                try:
                    del self.files[name]
                    file.close()
                finally:
                    file.mutex.release()
                return

    def _drop(self, name: str) -> None:
        """Forget a record whose file was closed, so that it is opened again."""
        with self._mutex:
            file = self.files.get(name)
            if file is not None and file.fd < 0:
                del self.files[name]


class _Patience:
    """
    Trying for the flock of a record: some times at once, then with pauses, then no more.

    Nobody has it for more than some microseconds unless it is stopped.
    """

    def __init__(self, runtime: Runtime, now: float, answer_by: float) -> None:
        self._runtime = runtime
        self._spins = FLOCK_SPINS
        self._pause = FLOCK_PAUSE_MIN
        self.began = now
        self._give_up_at = now + seconds_left(answer_by, now)

    async def wait(self, now: float) -> bool:
        """Wait before the next try; False if there is to be none."""
        if self._spins:
            self._spins -= 1
        elif now >= self._give_up_at:
            return False
        else:
            pause = self._pause * self._runtime.random.uniform(0.5, 1.5)
            await self._runtime.sleep(min(pause, self._give_up_at - now))
            self._pause = min(self._pause * 2, FLOCK_PAUSE_MAX)
        return True


def _stuck(path: str, seconds: float) -> str:
    return (
        f"{path} has been flocked for {seconds:.1f} s by {who_flocked(path)}, which must have been stopped "
        "within the few microseconds that this takes, or is no lockkit: let it go on, or end it"
    )
