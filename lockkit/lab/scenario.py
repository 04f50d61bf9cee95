"""
Scenarios: who does what when, and what goes wrong. Read from TOML, and checked before anything runs.

A file has one scene, or several in ``[[scene]]``. Every message about a file names the line and the key.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn
from urllib.parse import parse_qsl

from lockkit import validation
from lockkit.errors import ConfigurationError
from lockkit.validation import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lockkit.units import Seconds

__all__ = ["ACTIONS", "BACKENDS", "Backend", "Scenario", "Scene", "Step", "parse_backend", "read_scenario"]

TTL_MIN = 0.1
"""Shortest ttl of a scene, seconds. Shorter is lost in the latencies of messages."""

TTL_MAX = 3600.0
"""Longest ttl of a scene, seconds. Longer makes simulations of hours with a renewal every few seconds."""

TTLS_MAX = 100.0
"""Longest time of a scene, in multiples of its ttl."""

CLIENTS_MAX = 6
"""Most clients of a scene: more lanes than that cannot be read on a phone."""

SEED_MAX = 2**63 - 1
"""Largest seed: what TOML promises to keep."""

STEPS_MAX = 100
SCENES_MAX = 12
TEXT_MAX = 1000

Expectation = Literal["kept", "contained", "broken"]
EXPECTATIONS: Final = ("kept", "contained", "broken")

ACTIONS: Final[Mapping[str, frozenset[str]]] = {
    "acquire": frozenset({"timeout", "renew"}),
    "lead": frozenset(),
    "release": frozenset(),
    "check": frozenset(),
    "write": frozenset({"check", "delay"}),
    "pause": frozenset({"for"}),
    "kill": frozenset(),
    "cut": frozenset({"for", "nodes"}),
    "clock": frozenset({"by"}),
}
"""What a client does, or what is done to it, and the further keys of each."""

NODE_ACTIONS: Final[Mapping[str, frozenset[str]]] = {
    "pause": frozenset({"for"}),
    "stop": frozenset({"for", "lose_data"}),
    "clock": frozenset({"by"}),
    "failover": frozenset({"for"}),
    "lag": frozenset({"for"}),
}
"""What is done to a node, and the further keys of each."""

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
    "by-hand": {"recipe": validation.parse_text},
}

RECIPES: Final = ("setnx", "delete", "getset")


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
    """
    Read a backend, such as ``redis`` or ``redlock?durable=1``.

    Raises:
        ConfigurationError: There is no such backend or option in the lab.
    """
    kind, _, query = text.partition("?")
    kind = kind.removesuffix("://")
    if kind not in BACKENDS:
        message = f"the lab has no backend {kind!r}; it has {', '.join(BACKENDS)}"
        raise ConfigurationError(message)
    options: list[tuple[str, Any]] = []
    for name, value in parse_qsl(query, keep_blank_values=True):
        parse = _OPTIONS[kind].get(name)
        if parse is None:
            known = ", ".join(_OPTIONS[kind]) or "none"
            message = f"backend {text!r}: no option {name!r}; options of {kind} in the lab: {known}"
            raise ConfigurationError(message)
        try:
            options.append((name, parse(value)))
        except ValueError as error:
            message = f"backend {text!r}: {name}: {error}"
            raise ConfigurationError(message) from error
    if kind == "by-hand" and dict(options).get("recipe") not in RECIPES:
        message = f"backend {text!r}: give a recipe: by-hand?recipe={'|'.join(RECIPES)}"
        raise ConfigurationError(message)
    return Backend(kind, tuple(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """
    One step of a client, or one fault.

    Attributes:
        at: When, seconds. A client that is late does it as soon as it can.
        who: The client or node.
        action: What; see `ACTIONS` and `NODE_ACTIONS`.
        on_node: It is done to a node.
        seconds: ``for``: how long it lasts; None: to the end.
        by: How far a clock jumps, seconds.
        delay: How long a write is under way, seconds.
        timeout: Of ``acquire``, seconds.
        check: Look at the lease right before the write.
        renew: The lease is renewed.
        lose_data: The node restarts without its data.
        nodes: From which nodes a client is cut off; empty: all.
        backends: Only with these; empty: with all.
        line: In the file.
    """

    at: float
    who: str
    action: str
    on_node: bool
    seconds: float | None = None
    by: float = 0.0
    delay: float = 0.0
    timeout: float | None = None
    check: bool = False
    renew: bool = True
    lose_data: bool = False
    nodes: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """
    One course of events on one backend.

    Attributes:
        title: What it is about, in a few words.
        about: What to see, in a sentence or two.
        backends: Those that it can run on; the first unless another is asked for.
        ttl: Of the leases, seconds.
        fenced: The storage compares tokens.
        clients: Their names.
        steps: In order of time.
        until: The end of the drawing, seconds; None: a little after the last event.
        latency: Of a message in one direction, least and most, seconds.
        messages: Draw the messages between clients and servers.
        expect: What the verdict should be; None: nothing is expected.
    """

    title: str
    about: str
    backends: tuple[Backend, ...]
    ttl: Seconds
    fenced: bool
    clients: tuple[str, ...]
    steps: tuple[Step, ...]
    until: float | None = None
    latency: tuple[float, float] = (0.001, 0.003)
    messages: bool = False
    expect: Expectation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """
    Scenes that belong together.

    Attributes:
        name: As it is asked for.
        title: Of all.
        about: Of all.
        seed: Draws latencies and the order of what happens at once.
        scenes: At least one.
    """

    name: str
    title: str
    about: str
    seed: int
    scenes: tuple[Scene, ...]

    def on(self, backend: str) -> Scenario:
        """
        Keep the scenes that can run on a backend, and run them there.

        Raises:
            ConfigurationError: None of them can.
        """
        wanted = parse_backend(backend)
        exact = [scene for scene in self.scenes if wanted in scene.backends]
        same = [scene for scene in self.scenes if wanted.kind in {one.kind for one in scene.backends}]
        chosen = exact or same
        if not chosen:
            known = dict.fromkeys(str(one) for scene in self.scenes for one in scene.backends)
            message = f"scenario {self.name!r} does not fit the backend {backend!r}; it runs on {', '.join(known)}"
            raise ConfigurationError(message)
        return replace(self, scenes=tuple(replace(scene, backends=(wanted,)) for scene in chosen))


# -- reading ----------------------------------------------------------------------------------------------------------


def read_scenario(text: str, name: str, *, ttl: Seconds | None = None) -> Scenario:
    """
    Read a scenario from TOML.

    Args:
        text: The file.
        name: For messages and titles: the file's name.
        ttl: In place of those of the file.

    Raises:
        ConfigurationError: Something in it is wrong; the message says where and what to write.
    """
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits; thousands of brackets
        message = f"{name}: this is not TOML: {error}"
        raise ConfigurationError(message) from error
    return _Reader(name, text, ttl).scenario(data)


_SCENARIO_KEYS: Final = {"title", "about", "seed", "scene"}
_SCENE_KEYS: Final = {
    "title", "about", "backend", "backends", "ttl", "fenced", "clients", "until", "latency", "messages", "expect",
    "step",
}  # fmt: skip
_STEP_KEYS: Final = {"at", "client", "node", "do", "backends"} | set().union(*ACTIONS.values(), *NODE_ACTIONS.values())
_TIME: Final = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*(ttl|ms|s)\s*")


class _Reader:
    """Reads one file, and knows its lines."""

    def __init__(self, name: str, text: str, ttl: Seconds | None) -> None:
        self._name = name
        self._ttl = ttl
        self._lines = _lines(text)

    def scenario(self, data: dict[str, Any]) -> Scenario:
        several = "scene" in data
        self._known(data, _SCENARIO_KEYS if several else _SCENARIO_KEYS - {"scene"} | _SCENE_KEYS, "")
        seed = data.get("seed", 1)
        if type(seed) is not int or not 0 <= seed <= SEED_MAX:
            self._wrong("seed", f"must be a whole number from 0 to {SEED_MAX}, not {shown(seed)}")
        scenes = self._tables(data, "scene", "", SCENES_MAX) if several else [data]
        title = self._text(data, "title", "", self._name)
        return Scenario(
            name=self._name,
            title=title,
            about=self._text(data, "about", "", ""),
            seed=seed,
            scenes=tuple(
                self._scene(scene, f"scene[{index}]." if several else "", title) for index, scene in enumerate(scenes)
            ),
        )

    def _scene(self, data: dict[str, Any], path: str, title: str) -> Scene:
        if path:
            self._known(data, _SCENE_KEYS, path)
        ttl = self._scene_ttl(data, path)
        backends = self._backends(data, path)
        clients = self._names(data, "clients", path, ("A", "B"))
        if not 1 <= len(clients) <= CLIENTS_MAX or len(set(clients)) < len(clients):
            self._wrong(f"{path}clients", f"must be 1 to {CLIENTS_MAX} different names")
        taken = {node for backend in backends for node in backend.nodes} | {"storage"}
        if taken & set(clients):
            self._wrong(f"{path}clients", f"{', '.join(sorted(taken & set(clients)))} is the name of a node here")
        steps = [
            self._step(step, f"{path}step[{index}].", clients, backends, ttl)
            for index, step in enumerate(self._tables(data, "step", path, STEPS_MAX))
        ]
        expect = data.get("expect")
        if expect is not None and expect not in EXPECTATIONS:
            self._wrong(f"{path}expect", f"must be one of {', '.join(EXPECTATIONS)}, not {shown(expect)}")
        until = self._time(data, "until", path, ttl) if "until" in data else None
        if until == 0:
            self._wrong(f"{path}until", "must be later than 0")
        return Scene(
            title=self._text(data, "title", path, title),
            about=self._text(data, "about", path, ""),
            backends=backends,
            ttl=ttl,
            fenced=self._flag(data, "fenced", path),
            clients=clients,
            steps=tuple(sorted(steps, key=lambda step: step.at)),
            until=until,
            latency=self._latency(data, path, ttl),
            messages=self._flag(data, "messages", path),
            expect=expect,
        )

    def _scene_ttl(self, data: dict[str, Any], path: str) -> float:
        ttl = data.get("ttl", 10.0)
        if type(ttl) not in {int, float} or not TTL_MIN <= ttl <= TTL_MAX:
            self._wrong(f"{path}ttl", f"must be {TTL_MIN:g} to {TTL_MAX:g} seconds, not {shown(ttl)}")
        return float(ttl) if self._ttl is None else self._ttl

    def _backends(self, data: dict[str, Any], path: str) -> tuple[Backend, ...]:
        if "backend" in data and "backends" in data:
            self._wrong(f"{path}backend", "give backend or backends, not both")
        if "backend" in data:
            words: tuple[str, ...] = (self._text(data, "backend", path, ""),)
            key = f"{path}backend"
        else:
            words, key = self._names(data, "backends", path, ("redis",)), f"{path}backends"
        if not words:
            self._wrong(key, "must name a backend")
        try:
            return tuple(parse_backend(word) for word in words)
        except ConfigurationError as error:
            self._wrong(key, str(error))

    def _step(
        self, data: dict[str, Any], path: str, clients: Sequence[str], backends: Sequence[Backend], ttl: Seconds
    ) -> Step:
        self._known(data, _STEP_KEYS, path)
        if ("client" in data) == ("node" in data):
            self._wrong(path.removesuffix("."), "give client or node: who does it, or to which node it is done")
        on_node = "node" in data
        who = self._text(data, "node" if on_node else "client", path, "")
        actions = NODE_ACTIONS if on_node else ACTIONS
        action = self._text(data, "do", path, "")
        if action not in actions:
            self._wrong(f"{path}do", f"must be one of {', '.join(actions)}, not {action!r}")
        only = self._names(data, "backends", path, ())
        self._check_who(who, path, clients, [one for one in backends if not only or one.kind in only], on_node=on_node)
        allowed = actions[action] | {"at", "client", "node", "do", "backends"}
        for key in data:
            if key not in allowed:
                self._wrong(f"{path}{key}", f"{action!r} takes no {key!r}; it takes {', '.join(sorted(allowed))}")
        if "at" not in data:
            self._wrong(path.removesuffix("."), "say when, by at")
        for key in only:
            if key not in BACKENDS:
                self._wrong(f"{path}backends", f"the lab has no backend {key!r}; it has {', '.join(BACKENDS)}")
        nodes = self._names(data, "nodes", path, ())
        known = {node for backend in backends for node in backend.nodes}
        if not set(nodes) <= known:
            self._wrong(f"{path}nodes", f"nodes here are {', '.join(sorted(known))}")
        return Step(
            at=self._time(data, "at", path, ttl),
            who=who,
            action=action,
            on_node=on_node,
            seconds=self._time(data, "for", path, ttl) if "for" in data else None,
            by=self._time(data, "by", path, ttl, signed=True) if "by" in data else 0.0,
            delay=self._time(data, "delay", path, ttl) if "delay" in data else 0.0,
            timeout=self._time(data, "timeout", path, ttl) if "timeout" in data else None,
            check=self._flag(data, "check", path),
            renew=self._flag(data, "renew", path, default=True),
            lose_data=self._flag(data, "lose_data", path),
            nodes=nodes,
            backends=only,
            line=self._line(path.removesuffix(".")),
        )

    def _check_who(
        self, who: str, path: str, clients: Sequence[str], backends: Sequence[Backend], *, on_node: bool
    ) -> None:
        if not on_node and who not in clients:
            self._wrong(f"{path}client", f"there is no client {who!r}; clients are {', '.join(clients)}")
        if on_node and not any(who in backend.nodes for backend in backends):
            known = ", ".join(dict.fromkeys(node for backend in backends for node in backend.nodes))
            there_are = f"nodes are {known}" if known else "the step is for none of the scene's backends"
            self._wrong(f"{path}node", f"there is no node {who!r}; {there_are}")

    # -- values --------------------------------------------------------------------------------------------------------

    def _known(self, data: dict[str, Any], keys: set[str], path: str) -> None:
        for key in data:
            if key not in keys:
                self._wrong(f"{path}{key}", f"there is no such key; keys are {', '.join(sorted(keys))}")

    def _tables(self, data: dict[str, Any], key: str, path: str, most: int) -> list[dict[str, Any]]:
        value = data.get(key)
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value) or not value:
            self._wrong(f"{path}{key}", f"give at least one table [[{_table(path, key)}]]")
        if len(value) > most:
            self._wrong(f"{path}{key}", f"at most {most}, not {len(value)}")
        return value

    def _text(self, data: dict[str, Any], key: str, path: str, default: str) -> str:
        value = data.get(key, default)
        if not isinstance(value, str) or len(value) > TEXT_MAX:
            self._wrong(f"{path}{key}", f"must be a text of at most {TEXT_MAX} characters, not {shown(value)}")
        if any(not char.isprintable() for char in value.replace("\n", " ")):
            self._wrong(f"{path}{key}", "must have printable characters only")
        return " ".join(value.split())

    def _names(self, data: dict[str, Any], key: str, path: str, default: tuple[str, ...]) -> tuple[str, ...]:
        value = data.get(key, list(default))
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self._wrong(f"{path}{key}", f"must be a list of texts, not {shown(value)}")
        if key == "clients" and not all(re.fullmatch(r"\w{1,12}", one) for one in value):
            self._wrong(f"{path}{key}", "each name must have 1 to 12 letters or digits")
        return tuple(value)

    def _flag(self, data: dict[str, Any], key: str, path: str, *, default: bool = False) -> bool:
        value = data.get(key, default)
        if not isinstance(value, bool):
            self._wrong(f"{path}{key}", f"must be true or false, not {shown(value)}")
        return value

    def _latency(self, data: dict[str, Any], path: str, ttl: Seconds) -> tuple[float, float]:
        value = data.get("latency", [0.001, 0.003])
        if not isinstance(value, list) or len(value) != len(("least", "most")):
            self._wrong(f"{path}latency", f"must be a list of two times, least and most, not {shown(value)}")
        least, most = (self._time({"latency": one}, "latency", path, ttl) for one in value)
        if not 0 < least <= most <= ttl:
            self._wrong(f"{path}latency", "the least must be above 0, and the most not less than it nor above the ttl")
        return least, most

    def _time(self, data: dict[str, Any], key: str, path: str, ttl: Seconds, *, signed: bool = False) -> float:
        value = data[key]
        wrong = f"must be seconds, or a text such as '0.5 ttl', '20 ms', '3 s', not {shown(value)}"
        if isinstance(value, str):
            found = _TIME.fullmatch(value)
            if found is None:
                self._wrong(f"{path}{key}", wrong)
            seconds = float(found[1]) * {"ttl": ttl, "ms": 0.001, "s": 1.0}[found[2]]
        elif type(value) is int or (type(value) is float and isfinite(value)):
            seconds = value
        else:
            self._wrong(f"{path}{key}", wrong)
        if not (-TTLS_MAX * ttl if signed else 0.0) <= seconds <= TTLS_MAX * ttl:
            self._wrong(f"{path}{key}", f"must be {'' if signed else 'from 0 '}to {TTLS_MAX:g} ttl, not {shown(value)}")
        return float(seconds)

    def _line(self, path: str) -> int:
        """Find the line of a key, or of the nearest table around it."""
        while path and path not in self._lines:
            path = path.rpartition(".")[0]
        return self._lines.get(path, 1)

    def _wrong(self, path: str, problem: str) -> NoReturn:
        message = f"{self._name}, line {self._line(path)}: {path}: {problem}"
        raise ConfigurationError(message)


def _table(path: str, key: str) -> str:
    return f"{path.partition('[')[0]}.{key}" if path else key


def _lines(text: str) -> dict[str, int]:
    """Find the line of each key and table, as far as one key stands on one line."""
    found: dict[str, int] = {}
    counts: dict[str, int] = {}
    path = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[\s*([\w.]+)\s*\]\]", line):
            *outer, last = header[1].split(".")
            above = f"{outer[0]}[{counts.get(outer[0], 1) - 1}]." if outer else ""
            key = f"{above}{last}"
            index = counts[key] = counts.get(key, 0) + 1
            path = f"{key}[{index - 1}]"
            found.setdefault(path, number)
            found.setdefault(key, number)
        elif key_line := re.match(r"\s*([\w-]+)\s*=", line):
            found.setdefault(f"{path}.{key_line[1]}" if path else key_line[1], number)
    return found
