"""
Draws the schedule that breaks a promise, as the lab draws its scenes.

The headers of the models say how; what `common.h` says is true of all models that do not say it themselves::

    @fact NAME LANE EXPRESSION     a state, drawn if NAME is a kind of span; `c` is a client, `n` a node of LANE[NODES];
                                   `token` is the token of a client
    @tell [PROCESS.]NAME[+-] TEXT  a line of the story, when a fact or a variable rises or falls; `-` for none
    @names RUN NAME, NAME...       of the clients of a run, instead of A, B, C in the order in which they hold the lock
    @storage VARIABLE              the token that storage has seen last
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from lockkit_tools.lab.drawing import Drawing, Numbered
from lockkit_tools.lab.record import Grant, Lane, Mark, Message, Overlap, Record, Span, SpanKind
from lockkit_tools.lab.svg import picture
from tests.models.check import MODELS, Model, Mutant, Search, Step, Values

DRAWINGS = MODELS.parent / "docs" / "drawings"

TICK_WIDTH, END_WIDTH = 1.6, 5.0
"""Of a tick, and of what is behind the last step, where a step is 1 wide."""

EXCLUSIVE = ("exclusion", "acting", "together")
"""Promises that no two clients hold the lock."""

HOLDING = ("holds", "stopping")
"""Facts of a client that holds the lock, as it believes."""

TIME = "Time"
_COMMON = MODELS / "common.h"


class Key(NamedTuple):
    """What may change: a fact or a variable; the lane that it belongs to, and the client that it is about."""

    name: str
    lane: str = ""
    who: str = ""


class Fact(NamedTuple):
    """A state of a lane, by the values of the variables."""

    name: str
    lane: str
    node: int
    expression: str

    def of(self, values: Values, client: int) -> int:
        """Return its value: 0 if it is not so, or before the first value of a local variable."""
        python = self.expression.replace("&&", " and ").replace("||", " or ")
        names = Values(values | {"c": client, "n": self.node})
        try:
            return int(eval(python, {"__builtins__": {}}, names))  # noqa: S307 - written in the header of a model
        except (KeyError, TypeError, ValueError):
            return 0


class Notes:
    """What the headers say."""

    def __init__(self, model: Model) -> None:
        self.facts: list[Fact] = []
        self.tells: dict[str, str] = {}
        texts = (_COMMON.read_text(), model.text)
        for text in texts:
            self.tells |= dict(re.findall(r"^ \* @tell (\S+) +(.+)$", text, re.MULTILINE))
            found = re.findall(r"^ \* @fact (\w+) +(\w+)(?:\[(\d)\])? +(.+)$", text, re.MULTILINE)
            self.facts = [fact for fact in self.facts if fact.name not in {one[0] for one in found}]
            for name, lane, nodes, expression in found:
                lanes = [f"{lane} {node + 1}" for node in range(int(nodes))] if nodes else [lane]
                self.facts += [Fact(name, one, node, expression) for node, one in enumerate(lanes)]
        self.storage = " ".join(re.findall(r"^ \* @storage +(.+)$", model.text, re.MULTILINE)).split()
        self.names = dict(re.findall(r"^ \* @names +(\w+) +(.+)$", model.text, re.MULTILINE))
        self.told = list(dict.fromkeys(tell.split(".")[-1].rstrip("+-") for tell in self.tells))
        self.servers = list(dict.fromkeys(fact.lane for fact in self.facts if fact.lane != "client"))

    def tell(self, process: str, name: str, change: int) -> str:
        """Return what to tell of a change: by `Time`, only what is meant for it."""
        sign = "+" if change > 0 else "-"
        general = "" if process == TIME else self.tells.get(name + sign, "")
        return self.tells.get(f"{process}.{name}{sign}", general).removeprefix("-")


class Trace:
    """The record of a schedule."""

    def __init__(self, model: Model, mutant: Mutant, found: Search) -> None:
        self._mutant, self._found = mutant, found
        self.notes = Notes(model)
        self.record = Record()
        self.axis = [(0.0, "0")]
        flags = dict(flag[2:].partition("=")[::2] for flag in model.runs[mutant.run])
        self._flags = {name: int(value) for name, value in flags.items() if value}
        self._given = self.notes.names.get(mutant.run, "A, B, C").split(", ")
        self.names = dict[int, str]()
        for number in self._order():
            one = self._given[number].rstrip(" 2")
            alike = [name for name in self._given if name.rstrip(" 2") == one or mutant.run not in self.notes.names]
            self.names[number] = next(name for name in alike if name not in self.names.values())
        self._mistakes = mistake_lines(model, mutant.define)
        self._at = 0.0
        self._states: list[tuple[float, dict[Key, int]]] = []
        self._asked: dict[str, float] = {}  # when each client sent its request
        self._answers: dict[str, dict[str, float]] = {}  # which server executed it when
        self._late = ("", 0.0)  # a message that its sender has given up
        self._read()

    def _order(self) -> list[int]:
        """Return the clients in the order in which they hold the lock, or else ask for it."""
        changes = [step.values[name] for name in ("left", "since") for step in self._found.trail]
        acting = [number for values in changes for number, value in values.items() if value]
        return [*dict.fromkeys([*acting, *range(self._flags["CLIENTS"])])]

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        before = self._state(self._found.start)
        self._states.append((0.0, before))
        for step in self._found.trail:
            after = self._state(step.values)
            changes = {key: value - before.get(key, 0 if key.lane else value) for key, value in after.items()}
            changes = {key: change for key, change in changes.items() if change}
            marks = self._marks(step, changes, after)
            servers = {key.lane for key in changes} & {*self.notes.servers}
            self._at += TICK_WIDTH if step.process == TIME else 1 if marks else 0.6 * bool(servers)
            for mark in marks:
                mark.at = self._at
            self.record.marks += marks
            if step.process == TIME:
                self.axis.append((self._at, str(len(self.axis))))
            else:
                self._send(step, changes, sorted(servers))
            self._states.append((self._at, after))
            before = after
        self._end()

    def _state(self, values: Values) -> dict[Key, int]:
        """Return all that may be told or drawn: facts, and variables whose name no fact has."""
        state: dict[Key, int] = {}
        values = Values(values | self._flags)
        for fact in self.notes.facts:
            of_client = fact.lane == "client" or re.search(r"\bc\b", fact.expression)
            for number, name in self.names.items() if of_client else ((0, ""),):
                lane = name if fact.lane == "client" else fact.lane
                state[Key(fact.name, lane, name)] = fact.of(values, number)
        for variable in values.keys() - {fact.name for fact in self.notes.facts}:
            value = values[variable]
            if isinstance(value, int):
                state[Key(variable)] = value
            elif isinstance(value, dict):
                of_clients = {Key(variable, name, name): value.get(number, 0) for number, name in self.names.items()}
                state |= {key: one for key, one in of_clients.items() if isinstance(one, int)}
        return state

    def _lane(self, step: Step) -> str:
        return self.names.get(step.number) or (self.notes.servers or [*self.names.values()])[0]

    def _marks(self, step: Step, changes: dict[Key, int], after: dict[Key, int]) -> list[Mark]:
        """Return the lines of the story for a step."""
        me = self._lane(step)
        told = [(key, change) for name in self.notes.told for key, change in changes.items() if key.name == name]
        marks = [mark for one in told if (mark := self._mark(step, *one, after))]
        if bad := [mark for mark in marks if mark.tone == "bad"]:
            return [mark for mark in marks if mark.lane != bad[0].lane] + bad
        if Key("crashes") in changes and me in self.names.values():
            self.record.dead[me] = self._at + 1
            marks = [mark for mark in marks if mark.lane != me or mark.text.endswith("crashes")]
        if self._mistakes & {*step.places}:
            text = capital(self._mutant.text)
            if not marks and text not in {mark.text for mark in self.record.marks}:
                marks = [Mark(0, me, text)]
            for mark in marks:
                mark.tone = "fault"
        return marks

    def _mark(self, step: Step, key: Key, change: int, after: dict[Key, int]) -> Mark | None:
        """Return the line of the story for a change, if there is one."""
        template = self.notes.tell(step.process, key.name, change)
        if not template:
            return None
        lane, who = key.lane or self._lane(step), key.who or self._lane(step)
        text = capital(f"{lane} {template.format(who=who, token=after.get(Key('token', who, who), 0))}")
        text = f"The {lane}{text[len(lane) :]}" if lane in {"server", "record"} else text
        me = self.names.get(step.number, who)
        if key.name == "kept" and change < 0 and me != who:  # nobody frees the lock of another client, but by mistake
            return Mark(0, lane, f"{text}, at {me}'s request", "fault")
        return Mark(0, lane, text, "bad" if key.name == self._mutant.promise else "plain")

    # -- messages ------------------------------------------------------------------------------------------------------

    def _send(self, step: Step, changes: dict[Key, int], servers: list[str]) -> None:
        """Read the messages of a step: to the servers that it changes, and, of who holds the lock now, from them."""
        me, at, messages = self.names.get(step.number, ""), self._at, self.record.messages
        asked, holds = (changes.get(Key(name, me, me), 0) for name in ("since", "holds"))
        if asked > 0:
            self._asked[me], self._answers[me] = at, {}
        elif asked < 0:
            self._asked.pop(me, None)
        sender, sent = (me, self._asked.get(me, at - 0.7)) if me else self._late
        for server in servers if sender else ():
            messages.append(Message(sender, server, sent, at, "request"))
            self._answers.setdefault(sender, {})[server] = at
        if Key("losses") in changes:
            self._late = (me, at)
        if holds > 0:
            messages += [Message(server, me, sent, at, "answer") for server, sent in self._answers.pop(me, {}).items()]
        if me and {key.name for key in changes} & {"stale", "readers", *self.notes.storage}:
            fate: Literal["overwrote", "refused", "accepted"] = (
                "overwrote" if Key("stale") in changes else "refused" if Key("readers") in changes else "accepted"
            )
            messages.append(Message(me, "storage", at - 0.7, at, "write", fate))

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        record = self.record
        record.end = max(1.38 * self._at, self._at + END_WIDTH)
        self._spans()
        if self._mutant.promise == "progress":
            for name in [name for number, name in self.names.items() if number in self._found.stuck]:
                record.marks.append(Mark(self._at + 1, name, capital(f"{name} waits for ever"), "bad"))
                start = max((span.end for span in record.spans if span.lane == name), default=0.0)
                if start < record.end:
                    record.spans.append(Span(name, "waits", start, record.end))
        shown = {span.lane for span in record.spans} | {mark.lane for mark in record.marks}
        record.lanes += [Lane(name, "client", name) for name in self.clients if name in shown]
        record.lanes += [Lane(name, "server", name) for name in self.notes.servers]
        if any(message.kind == "write" for message in record.messages):
            record.lanes.append(Lane("storage", "storage", "storage"))
        if self._mutant.promise in EXCLUSIVE:
            older, newer = sorted(self.holders().items(), key=lambda one: one[1])[-2:]
            record.overlaps.append(Overlap(newer[1], record.end, older[0], newer[0]))

    @property
    def clients(self) -> list[str]:
        """Return the clients from above."""
        return [name for name in self._given if name in self.names.values()]

    def holders(self) -> dict[str, float]:
        """Return who holds the lock at the end, as it believes, and since when."""
        since: dict[str, float] = {}
        for at, state in self._states:
            holding = [who for who in self.clients if any(state.get(Key(kind, who, who)) for kind in HOLDING)]
            since = {who: since.get(who, at) for who in holding}
        return since

    def _spans(self) -> None:
        """Read the spans of each lane from the states."""
        ends = [at for at, _ in self._states[1:]] + [self.record.end]
        running: dict[tuple[str, SpanKind], Span] = {}
        for (at, state), end in zip(self._states, ends, strict=True):
            shown = self._shown(state)
            running = {place: span for place, span in running.items() if place in shown}
            for (lane, kind), (who, token) in shown.items():
                span = running.get((lane, kind))
                if span is None or (span.who, span.token) != (who, token):
                    span = running[lane, kind] = Span(lane, kind, at, end, who, token)
                    self.record.spans.append(span)
                    if token is not None:
                        self.record.grants.append(Grant(who, token, at, end))
                span.end = end
        self.record.spans = [span for span in self.record.spans if span.end > span.start]

    def _shown(self, state: dict[Key, int]) -> dict[tuple[str, SpanKind], tuple[str, int | None]]:
        """Return which kinds of spans each lane shows, with whom they are about and its token."""
        shown: dict[tuple[str, SpanKind], tuple[str, int | None]] = {}
        kept = {
            who: [value for key, value in state.items() if key[::2] == ("kept", who)] for who in self.names.values()
        }
        for (name, lane, who), value in state.items():
            if not value or not lane or name not in get_args(SpanKind):
                continue
            if name == "holds":
                known = not kept[who] or 2 * sum(kept[who]) > len(kept[who])
                shown[lane, "holds" if known else "believes"] = (who, state.get(Key("token", who, who)) or None)
            else:
                kind = cast("SpanKind", name)
                former = shown.get((lane, kind), ("", None))[0]
                shown[lane, kind] = (f"{former} and {who}" if former else who, None)
        return shown


def capital(text: str) -> str:
    """Begin a text with a capital letter."""
    return text if re.match(r"\w+[._]", text) else text[0].upper() + text[1:]


def mistake_lines(model: Model, define: str) -> set[tuple[str, int]]:
    """Return the lines that a mutant has and the model has not: file and number."""
    lines, inside = set(), list[bool]()
    name = define.partition("=")[0]
    for number, line in enumerate(model.text.splitlines(), 1):
        directive = re.match(r"#(if|elif|else|endif)", line)
        if directive is None:
            if any(inside):
                lines.add((model.path.name, number))
            continue
        if directive[1] != "if":
            inside.pop()
        if directive[1] != "endif":
            inside.append(bool(re.search(rf"#(ifdef |(el)?if.*defined\(){name}\b", line)))
    return lines


def drawing(model: Model, mutant: Mutant, found: Search) -> Drawing:
    """Prepare the drawing of a schedule."""
    trace = Trace(model, mutant, found)
    passed = [sum(at <= mark.at for at, _ in trace.axis) - 1 for mark in trace.record.marks]
    lines = [
        # A tick is named where it begins.
        Numbered(number, mark, f"tick {tick}" if tick not in passed[: number - 1] else "")
        for number, (mark, tick) in enumerate(zip(trace.record.marks, passed, strict=True), 1)
    ]
    axis = [(0.0, "tick 0"), *trace.axis[1:]]
    promise = model.promises[mutant.promise]
    return Drawing(
        title=capital(mutant.text),
        about="The shortest schedule in which this mistake does harm, found by a search of all.",
        subtitle=f"model {model.name} · run {mutant.run} · mutant {mutant.define}",
        headline=f"BROKEN PROMISE: {promise}.",
        tone="bad",
        advice=(),
        footnote="Time passes in ticks, and none between them. Amber: where the mistake acts.",
        record=trace.record,
        clients=tuple(trace.clients),
        lines=tuple(lines),
        messages=("a request, and its answer (dashed)",),
        axis=tuple(axis),
    )


def draw(model: Model, mutant: Mutant, found: Search) -> str:
    """Draw a schedule as SVG."""
    one = drawing(model, mutant, found)
    return picture(one.title, [one])


def path_of(model: Model, mutant: Mutant) -> Path:
    """Return where the drawing of a mutant is."""
    return DRAWINGS / "models" / f"{model.name}-{mutant.define.lower().replace('=', '-')}.svg"
