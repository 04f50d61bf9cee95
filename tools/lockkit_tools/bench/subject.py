"""Who is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Face = Literal["blocking", "asyncio"]
Role = Literal["lockkit", "peer", "baseline"]
"""A baseline is the least work that a lock of its kind can do, written by hand."""

Scope = Literal["process", "machine", "network"]

Kind = Literal["lock", "read", "write", "permit", "locks", "election", "once"]
"""A primitive: a lock, the two sides of a read/write lock, a permit of a semaphore, several locks at once, the office
of a leader, work that is done once per key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One way to lock, on one server."""

    label: str
    target: str  # ``module:class`` of its adapter; for the import workload the statements to run
    url: str = field(repr=False)  # where it locks. **Holds the password**: goes to the worker process and nowhere else.
    group: str  # which subjects it is compared with: the same text for all subjects of one URL, no password in it
    face: Face
    role: Role  # lockkit, another library, or a baseline
    scope: Scope  # whom it excludes; contenders of a ``process`` scope are threads or tasks instead of processes
    number: int = 1  # tells equal entries apart (the same URL given twice)
    version: str = ""  # of the library; empty for a baseline
    poll: float = 0.0  # how often its waiters look again, seconds; 0 if they are woken
    ttl_min: float = 0.0  # the shortest lease that it grants, seconds
    renews: bool = False  # keeps a lease alive by itself
    session_each: bool = False  # each of its leases keeps a connection to the server
    workloads: tuple[str, ...] | None = None  # the only workloads of plain locks that apply; None means all
    kinds: tuple[Kind, ...] = ("lock",)  # the primitives that it has
    # Why it has not the others, by `Kind`; a peer or a baseline just has none.
    lacks: Mapping[str, str] = field(default_factory=dict, hash=False)
    tuning: str = ""  # in what its use differs from the library's defaults, and why
    missing: str = ""  # why it cannot be measured here; empty if it can
    imports: tuple[str, ...] = ()  # modules that its processes have imported before a turn begins

    @property
    def api(self) -> str:
        """The API, as people call it."""
        return {"blocking": "sync", "asyncio": "async"}[self.face]

    @property
    def key(self) -> str:
        """Identify the subject within a run, for people too."""
        number = f" #{self.number}" if self.number > 1 else ""
        return f"{self.label}{number} ({self.face}) at {self.group}"

    def to_json(self) -> dict[str, Any]:
        """Give everything that a reader wants, without the URL, which may have a password in it."""
        data = {"key": self.key, **asdict(self)}
        del data["url"], data["imports"]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Subject:
        """Read `to_json` back: where it locked is known by `group` alone."""
        fields = {name: value for name, value in data.items() if name != "key"}
        workloads = fields.pop("workloads")
        kinds = fields.pop("kinds", ("lock",))  # runs of before there were others have none
        return cls(url="", workloads=None if workloads is None else tuple(workloads), kinds=tuple(kinds), **fields)
