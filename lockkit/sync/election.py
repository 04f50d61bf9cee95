"""Leader election in the sync API."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from lockkit.engine.engine import Engine
from lockkit.engine.lease_record import LeaseRecord
from lockkit.lease import BaseElection, OtherApi
from lockkit.primitives.election import Candidate, Leader, Observer, ObservingEnded, Tenure, with_value
from lockkit.runtime import drive
from lockkit.sync.lease import Lease
from lockkit.units import Seconds

if TYPE_CHECKING:
    import threading


__all__ = ["Election", "Term"]

R = TypeVar("R")

STOP_LOOK_SECONDS: Seconds = 0.25
"""How often the thread that waits for ``stop`` looks whether `Election.run` has ended without it, seconds. Longer keeps
the thread; shorter costs wake-ups."""


class Term(Lease):
    """One term of a leader: a lease whose `token` is the term number."""

    __slots__ = ("_tenure",)

    def __init__(self, engine: Engine[Any], record: LeaseRecord) -> None:
        """Made by `Election.campaign`."""
        super().__init__(engine, record)
        self._tenure = Tenure(record, engine.renewer)

    @property
    def grace(self) -> float:
        """Seconds between the time from which `must_stop` is True and the deadline."""
        return self._record.renewal.grace

    def must_stop(self, seconds: float | timedelta | None = 0) -> bool:
        """
        Wait until the leader must stop: at ``deadline - grace``, when the term is lost, or after `resign`.

        Where the election has ``stall=``, also after so long without a call of this or of `beat`: each is a beat.
        Once True, it stays True. Any number of threads may ask.

        Args:
            seconds: How long to wait at most; 0 only looks, None waits without limit.

        Returns:
            Whether to stop. Then ``grace`` seconds are left to do so, unless the term was lost for another reason than
            its deadline.

        Raises:
            ConfigurationError: The time is wrong.
        """
        return drive(self._tenure.ask(seconds))

    def update(self, metadata: str | Mapping[str, object] | None) -> None:
        """See `Lease.update`. The election's value stays, unless `metadata` has another ``value``."""
        super().update(with_value(self._record, metadata))

    def resign(self) -> None:
        """
        End the term, so that another candidate can lead at once. The same as ``release()``.

        Raises:
            LockLost: It was lost before.
            BackendUnavailable: No answer. Renewal has stopped; call again, or leave it to the ttl.
        """
        self.release()


class Election(BaseElection):
    """A named election of a client. Holds nothing itself: every campaign that is won is a `Term` of its own."""

    __slots__ = ()
    _lease_from = "term = election.campaign()"
    __aenter__ = OtherApi("election.campaign()")
    _api = "lockkit"
    _candidate: Candidate[Term]

    def campaign(self, timeout: Seconds | timedelta | None = None) -> Term:
        """
        Wait to be elected. Use the term with ``with``, or call its `Term.resign` at the end.

        Args:
            timeout: Seconds to wait; None without limit, 0 tries once.

        Raises:
            LockTimeout: Another leader stayed for the whole wait.
            BackendUnavailable: The backend did not answer to the end of the wait (without timeout: for
                ``unavailable_after`` seconds).
            ConfigurationError: The timeout is wrong; or the backend granted a shorter ttl, for which the grace is too
                long.
        """
        return drive(self._candidate.campaign(timeout))

    def run(self, work: Callable[[Term], R], stop: threading.Event | None = None) -> R | None:
        """
        Campaign, call ``work(term)``, and campaign again when the term was lost.

        Args:
            work: Must return soon after ``term.must_stop(…)`` is True. If it raises an exception, lockkit resigns and
                raises it again; only a `LockLost` of this term counts as its loss, and,
                once it was lost, a `StaleToken`.
            stop: Ends the campaign, or makes ``term.must_stop(…)`` True.

        Returns:
            What `work` returned when it ended by itself or because of `stop`; None if `stop` came during a campaign.

        Raises:
            BackendUnavailable: The backend did not answer for ``unavailable_after`` seconds during a campaign.
            ConfigurationError: `work` is no function, or a coroutine function; or `stop` is no ``threading.Event`` or
                the like.
        """
        self._candidate.check_run(work, stop)
        signal = self._candidate.stop_signal()
        try:
            if stop is not None and stop.is_set():
                signal.set()
            elif stop is not None:
                self._candidate.watch(signal, functools.partial(stop.wait, STOP_LOOK_SECONDS))
            result: R | None = drive(self._candidate.run(work, signal))
            return result
        finally:
            signal.done = True

    def leader(self) -> Leader | None:
        """
        Ask the backend who leads now; None while nobody does.

        Raises:
            BackendUnavailable: It cannot be asked.
        """
        return drive(self._candidate.leader())

    def observe(self) -> Iterator[Leader | None]:
        """
        Follow the leaders: the present one first, then each change, None while nobody leads.

        Term numbers never go back. The iterator polls at random intervals of at most 1 s (a tenth of the ttl, if that
        is shorter), so it may miss shorter terms and vacancies. During an outage it waits. It ends when the client is
        closed.
        """
        return _Leaders(self._candidate.observe())


class _Leaders:
    """The iterator of `Election.observe`."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __iter__(self) -> Iterator[Leader | None]:
        return self

    def __next__(self) -> Leader | None:
        try:
            return drive(self._observer.next())
        except ObservingEnded:
            raise StopIteration from None
