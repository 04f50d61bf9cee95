"""What a scenario is made of: scenes, their steps, and the backends that they run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Final, Literal
from urllib.parse import parse_qsl

from lockkit import validation
from lockkit.errors import ConfigurationError

TTL = 10.0
"""ttl of all leases, seconds. The scenes are written for it."""

Action = Literal[
    "acquire", "lead", "check", "write", "release", "pause", "kill", "cut", "clock", "stop", "failover", "lag"
]

BACKENDS: Final[Mapping[str, tuple[str, ...]]] = {
    "redis": ("server",),
    "redis+sentinel": ("master", "replica"),
    "redlock": ("node1", "node2", "node3", "node4", "node5"),
    "etcd": ("etcd",),
    "zookeeper": ("zookeeper",),
    "by-hand": ("server",),
}
"""The nodes of each backend."""

_OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "redis": {},
    "redis+sentinel": {"replicas": validation.parse_int(0, 1)},
    "redlock": {"fencing": validation.parse_bool, "durable": validation.parse_bool},
    "etcd": {},
    "zookeeper": {},
    "by-hand": {"recipe": validation.parse_choice("setnx", "delete", "getset")},
}


@dataclass(frozen=True, slots=True)
class Backend:
    """A kind of backend with its options, such as ``redlock?durable=1``."""

    kind: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Name its nodes."""
        return BACKENDS[self.kind]

    def option(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - the option's own type
        """Give the value of an option."""
        return dict(self.options).get(name, default)

    def __str__(self) -> str:
        """Write it as it is given."""
        words = [f"{name}={_word(value)}" for name, value in self.options]
        return self.kind + ("?" + "&".join(words) if words else "")


def _word(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def parse_backend(text: str) -> Backend:
    """Read a backend, such as ``redis`` or ``redlock?durable=1``."""
    kind, _, query = text.partition("?")
    kind = kind.removesuffix("://")
    if kind not in BACKENDS:
        raise ConfigurationError(f"the lab has no backend {kind!r}; it has {', '.join(BACKENDS)}")
    options: list[tuple[str, Any]] = []
    for name, value in parse_qsl(query, keep_blank_values=True):
        parse = _OPTIONS[kind].get(name)
        if parse is None:
            known = ", ".join(_OPTIONS[kind]) or "none"
            raise ConfigurationError(f"backend {text!r}: no option {name!r}; options of {kind} in the lab: {known}")
        try:
            options.append((name, parse(value)))
        except ValueError as error:
            raise ConfigurationError(f"backend {text!r}: {name}: {error}") from error
    if kind == "by-hand" and not options:
        raise ConfigurationError(f"backend {text!r}: give a recipe: by-hand?recipe=setnx|delete|getset")
    return Backend(kind, tuple(options))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a client, or one fault."""

    at: float  # when, seconds. A client that is late does it as soon as it can.
    who: str  # the client or node. A node that the backend of the scene does not have is passed over.
    action: Action  # what. A node that stops loses its data.
    _: KW_ONLY
    lasts: float = 0.0  # seconds until a fault ends; 0: it does not
    by: float = 0.0  # how far a clock jumps ahead, seconds
    delay: float = 0.0  # how long a write is under way, seconds
    timeout: float | None = None  # of ``acquire``, seconds
    check: bool = False  # look at the lease right before the write
    nodes: tuple[str, ...] = ()  # from which nodes a client is cut off; empty: all


@dataclass(frozen=True, slots=True)
class Scene:
    """One course of events on one backend."""

    title: str  # what it is about, in a few words
    about: str  # what to see, in a sentence or two
    backends: tuple[Backend, ...]  # those that it can run on; the first unless another is asked for
    steps: tuple[Step, ...]  # in order of time. Each client asks for the lock once.
    _: KW_ONLY
    clients: tuple[str, ...] = ("A", "B")
    fenced: bool = False
    until: float | None = None  # the end of the drawing, seconds; None: a little after the last event
    latency: tuple[float, float] = (0.001, 0.003)  # of a message in one direction, least and most, seconds
    messages: bool = False  # draw the messages between clients and servers


@dataclass(frozen=True, slots=True)
class Scenario:
    """Scenes that belong together, under the name by which they are asked for."""

    name: str
    title: str
    about: str
    scenes: tuple[Scene, ...]

    def on(self, backend: str) -> Scenario:
        """Keep the scenes that can run on a backend, and run them there."""
        wanted = parse_backend(backend)
        exact = [scene for scene in self.scenes if wanted in scene.backends]
        same = [scene for scene in self.scenes if wanted.kind in {one.kind for one in scene.backends}]
        chosen = exact or same
        if not chosen:
            known = dict.fromkeys(str(one) for scene in self.scenes for one in scene.backends)
            message = f"scenario {self.name!r} does not fit the backend {backend!r}; it runs on {', '.join(known)}"
            raise ConfigurationError(message)
        return replace(self, scenes=tuple(replace(scene, backends=(wanted,)) for scene in chosen))
