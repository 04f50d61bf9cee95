"""One examination: finds the backend of a URL, runs its module and collects the findings."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from typing import Any, Protocol

from lockkit import validation
from lockkit.backend import LockBackend
from lockkit.configuration import profiles, registry
from lockkit.configuration.registry import DetachedHost
from lockkit.doctor.findings import Check, Finding, Severity
from lockkit.engine.settings import DEFAULT_TTL, drift_margin
from lockkit.runtime import drive
from lockkit.units import Seconds
from lockkit.url import Url

_PAGE = "how-to/check-your-servers.md#all-backends"

NOT_EXAMINED = Check(
    "not-examined",
    Severity.INFO,
    "The doctor has no checks for this backend, so the absence of findings means nothing.",
    _PAGE,
)

THIS_MACHINE_ONLY = Check(
    "this-machine-only",
    Severity.WARNING,
    "The locks lock out this user's processes on this machine only: anybody else may hold the same lock.",
    "reference/configuration.md#order",
)


SAMPLES = 15
"""How often a server is asked. More takes longer over a slow network; with fewer, one stall distorts the median."""

ROUND_TRIPS_MIN = 30
"""How many round trips should fit into a ttl. A renewal is due after a third of it, which leaves twenty round trips for
retries; with fewer, one stall of the network loses leases."""

ROUND_TRIPS_NEEDED = 3
"""With fewer, a lease has ended, or nearly, when its holder gets the reply: one round trip for the grant, one for the
first renewal, and one of delay."""

TTL_SHORT = 1.0
"""Seconds. Swapping or garbage collection can stop a process for longer than a third of that."""

TTL_BELOW_MINIMUM = Check(
    "ttl-below-minimum", Severity.ERROR, "lockkit refuses such a lock with ConfigurationError.", _PAGE
)
TTL_BELOW_ROUND_TRIP = Check(
    "ttl-below-round-trip",
    Severity.ERROR,
    "A lease ends before its holder gets the reply to its request, or before the first renewal arrives: locks are lost "
    "all the time.",
    _PAGE,
)
TTL_NEAR_ROUND_TRIP = Check(
    "ttl-near-round-trip",
    Severity.WARNING,
    "There is no time to retry a failed renewal: one stall of the network loses the lease.",
    _PAGE,
)
TTL_SHORT_CHECK = Check(
    "ttl-short",
    Severity.WARNING,
    "A holder that is stopped for two thirds of the ttl (a busy machine, garbage collection) loses its lease while it "
    "works.",
    "how-to/choose-a-ttl.md#start-from-these",
)


class _Module(Protocol):
    """The module that `lockkit.backend.LockBackend.examiner` names."""

    async def examine(self, examination: Examination) -> None:
        """Examine the servers and report to `examination`."""


class Examination:
    """What the ``examine`` module of a backend gets, and where it reports its findings."""

    def __init__(self, url: Url, options: Mapping[str, Any], backend_class: type[LockBackend], ttl: Seconds) -> None:
        """Examine nothing yet."""
        self.url = url  # the backend's; its text contains the password
        self.options = options  # the backend's, parsed, with their defaults; may contain passwords
        self.backend_class = backend_class
        self.ttl = ttl  # the ttl to judge, seconds
        self.host = DetachedHost()  # for the backend's own functions that connect
        self.runtime = self.host.runtime  # blocking
        self._facts: dict[str, str] = {}
        self._findings: list[Finding] = []

    def note(self, name: str, value: str) -> None:
        """Report a fact that is neither good nor bad: a version, a round trip."""
        self._facts[name] = value

    def find(self, check: Check, where: str, seen: str, fix: str) -> None:
        """Report a finding. The same finding at several servers becomes one."""
        for index, known in enumerate(self._findings):
            if (known.check, known.seen, known.fix) == (check, seen, fix):
                self._findings[index] = Finding(check, (*known.where, where), seen, fix)
                return
        self._findings.append(Finding(check, (where,), seen, fix))

    def has(self, check: Check) -> bool:
        """Tell whether there is a finding of that check, at any server."""
        return any(finding.check is check for finding in self._findings)

    async def time(self, where: str, ask: Callable[[], Awaitable[object]]) -> float:
        """Measure the median round trip to a server, seconds, and compare it with the ttl."""
        await ask()  # does not count: it may have to connect
        times = []
        for _ in range(SAMPLES):
            started = self.runtime.now()
            await ask()
            times.append(self.runtime.now() - started)
        round_trip, ttl = statistics.median(times), self.ttl
        self.note(f"round trip to {where}", f"{round_trip * 1000:.2f} ms")
        seen = f"A round trip takes {round_trip * 1000:.3g} ms, the ttl is {ttl:g} s."
        wanted = max(5.0, ROUND_TRIPS_MIN * round_trip)
        fix = f"Set ttl={wanted:.3g} or more, or move clients and server closer together."
        if ttl - drift_margin(ttl) <= ROUND_TRIPS_NEEDED * round_trip:
            self.find(TTL_BELOW_ROUND_TRIP, where, seen, fix)
        elif ttl < ROUND_TRIPS_MIN * round_trip:
            self.find(TTL_NEAR_ROUND_TRIP, where, seen, fix)
        return round_trip

    def judge_ttl(self) -> None:
        """Judge the ttl by the backend's shortest one, and by how long a process may be stopped."""
        ttl, capabilities = self.ttl, self.backend_class.capabilities
        where = self.url.safe_text
        if ttl < capabilities.min_ttl:
            self.find(
                TTL_BELOW_MINIMUM,
                where,
                f"The ttl is {ttl:g} s; the shortest ttl of this backend is {capabilities.min_ttl:g} s.",
                f"Set ttl={capabilities.min_ttl:g} or more, or leave it out for 30 s: {self.url.scheme}://…?ttl=30",
            )
        elif ttl < TTL_SHORT and capabilities.scope != "process":
            self.find(
                TTL_SHORT_CHECK,
                where,
                f"The ttl is {ttl:g} s.",
                "Set a ttl of 5 s or more: other clients then wait longer, but only after a crash.",
            )

    def diagnosis(self) -> Diagnosis:
        """Return what was found, the most serious first."""
        order = list(Severity)
        findings = sorted(self._findings, key=lambda finding: order.index(finding.check.severity))
        return Diagnosis(self.url.safe_text, self.ttl, dict(self._facts), tuple(findings))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """
    The result of an examination.

    Attributes:
        backend: The URL, without its password.
        ttl: The ttl that was judged, seconds.
        facts: Versions, round trips and the like, by name.
        findings: The most serious first.
    """

    backend: str
    ttl: float
    facts: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def reaching(self, threshold: Severity) -> list[Finding]:
        """Return the findings that are at least as serious as `threshold`."""
        return [finding for finding in self.findings if finding.check.severity.reaches(threshold)]

    def as_dict(self) -> dict[str, object]:
        """Return it in the form of the JSON output."""
        counts = {one.value: sum(finding.check.severity is one for finding in self.findings) for one in Severity}
        return {
            "backend": self.backend,
            "ttl": self.ttl,
            "facts": dict(self.facts),
            "counts": counts,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def examine(url: str | None = None, *, profile: str | None = None, ttl: Seconds | timedelta | None = None) -> Diagnosis:
    """Connect to the servers behind a URL and look for what endangers locks. Changes nothing there, and blocks."""
    return examine_settings(profiles.resolve(url, profile, {}), ttl=ttl)


def examine_settings(settings: profiles.Settings, *, ttl: Seconds | timedelta | None) -> Diagnosis:
    """Do what `examine` does, with settings that are resolved already."""
    with registry.from_source(settings.elsewhere):
        backend_class = registry.find_for(settings.url, settings.options)
        engine_options, options = registry.split_options(backend_class, settings.url, settings.options)
    # A ttl below the backend's shortest is a finding, not an error.
    wanted = validation.ttl(ttl if ttl is not None else engine_options["ttl"] or DEFAULT_TTL, 0.0)
    examination = Examination(settings.url, options, backend_class, wanted)
    if settings.embedded:
        examination.find(
            THIS_MACHINE_ONLY,
            settings.url.safe_text,
            "Nothing names a backend, so locks are files of this user on this machine.",
            "Give a URL, set LOCKKIT_URL, or write a lockkit.toml; scope=network or LOCKKIT_SCOPE=network refuses this",
        )
    examination.judge_ttl()
    drive(_examine(examination))
    return examination.diagnosis()


async def _examine(examination: Examination) -> None:
    url = examination.url
    target = examination.backend_class.examiner(url)
    if target is None:
        examination.find(
            NOT_EXAMINED,
            url.safe_text,
            f"There are no checks for {url.scheme}: URLs.",
            "Ask the maintainers of that backend for checks.",
        )
        return
    module: _Module = import_module(target)
    await module.examine(examination)
