"""One examination: finds the backend of a URL, runs its module and collects the findings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from typing import Any, Protocol

from lockkit import validation
from lockkit.backend import LockBackend
from lockkit.configuration import profiles, registry
from lockkit.configuration.registry import DetachedHost
from lockkit.doctor import timing
from lockkit.doctor.findings import Check, Finding, Severity
from lockkit.engine.settings import DEFAULT_TTL
from lockkit.runtime import drive
from lockkit.units import Seconds
from lockkit.url import Url

NOT_EXAMINED = Check(
    "not-examined",
    Severity.INFO,
    "The doctor has no checks for this backend, so the absence of findings means nothing.",
    "how-to/check-your-servers.md#all-backends",
)

THIS_MACHINE_ONLY = Check(
    "this-machine-only",
    Severity.WARNING,
    "The locks lock out processes of this machine only: on every other machine somebody may hold the same lock.",
    "reference/configuration.md#order",
)


class _Module(Protocol):
    """The module that `lockkit.backend.LockBackend.examiner` names."""

    async def examine(self, examination: Examination) -> None:
        """Examine the servers and report to `examination`."""


class Examination:
    """
    What the ``examine`` module of a backend gets, and where it reports its findings.

    Attributes:
        url: The backend's. **Its text contains the password.**
        options: The backend's options, parsed, with their defaults. **May contain passwords.**
        backend_class: The backend's.
        ttl: The ttl to judge, seconds.
        host: For the backend's own functions that connect.
        runtime: Blocking.
    """

    def __init__(self, url: Url, options: Mapping[str, Any], backend_class: type[LockBackend], ttl: Seconds) -> None:
        """Examine nothing yet."""
        self.url = url
        self.options = options
        self.backend_class = backend_class
        self.ttl = ttl
        self.host = DetachedHost()
        self.runtime = self.host.runtime
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
        """Measure the round trip to a server and compare it with the ttl."""
        round_trip = await timing.measure(self.runtime, ask)
        self.note(f"round trip to {where}", f"{round_trip * 1000:.2f} ms")
        timing.judge_round_trip(self, where, round_trip)
        return round_trip

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
            "Nothing names a backend, so locks are files of this machine.",
            "Give a URL, set LOCKKIT_URL, or write a lockkit.toml; scope=network or LOCKKIT_SCOPE=network refuses this",
        )
    timing.judge_ttl(examination)
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
