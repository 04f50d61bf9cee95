"""
Plays a scene on real processes and throw-away servers, and takes down what is measured.

Pauses are SIGSTOP, deaths SIGKILL, restarts those of the server; what a network does is done by proxies on loopback.
The simulated run says which step comes before which, and so it is here, also on a busy machine: before a fault or a
write, the clients finish what they had finished by then in the simulation.
"""

from __future__ import annotations

import heapq
import json
import signal
import socketserver
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, Final

from lockkit.backends.redis.keys import lock_key
from lockkit.errors import ConfigurationError
from lockkit.lab import real_client
from lockkit.lab.real_services import PARTS, Road, open_real_service, steps_of, why_not
from lockkit.lab.record import Grant, Lane, Mark, Message, Record, Span, Wait
from lockkit.lab.run import Result
from lockkit.lab.services import NAME, label_of
from lockkit.lab.stage import REASONS, WAIT_SHOWN, Storage, find_overlaps
from lockkit.lab.verdict import judge
from lockkit.testing.servers import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from lockkit.lab.real_services import RealService
    from lockkit.lab.record import SpanKind, Tone
    from lockkit.lab.run import Run
    from lockkit.lab.scenario import Scene, Step
    from lockkit.units import Instant

__all__ = ["TTL", "beside", "measure"]

TTL = 3.0
"""ttl of a measured scene unless another is asked for, seconds. Shorter ones are over sooner, and depend more on how
busy the machine is."""

PATIENCE = 30.0
"""Seconds after which a process that should have answered never will."""

REJOIN_SHARE = 0.5
"""When a former master comes back after another was promoted, as a share of the ttl."""

_DONE_TO_CLIENTS: Final = {"pause", "kill", "cut"}


def beside(run: Run) -> Run:
    """
    Play the scenes of a simulated run for real, and put each beside the simulated one.

    A scene that cannot be played for real stays alone, with the reason.

    Args:
        run: What was simulated.

    Raises:
        ConfigurationError: As for `measure`, if no scene can be played.
    """
    reasons = [why_not(result.scene) for result in run.results]
    if all(reasons):
        raise ConfigurationError(_refusal(run.results[0].scene, reasons[0]))
    results = []
    for result, reason in zip(run.results, reasons, strict=True):
        if reason:
            results.append(replace(result, unmeasured=reason))
            continue
        simulated, real = (
            replace(result.scene, title=f"{result.scene.title}: {word}") for word in ("simulated", "measured")
        )
        record = measure(real, result.record)
        results += [
            replace(result, scene=simulated),
            Result(real, record, judge(real, record), measured=PARTS[real.backends[0].kind]),
        ]
    return replace(run, results=tuple(results))


def measure(scene: Scene, simulated: Record) -> Record:
    """
    Play a scene for real. It takes as long as it says.

    Args:
        scene: What happens.
        simulated: What happened when it was simulated.

    Raises:
        ConfigurationError: It has something that cannot be done to real processes, or the server is not installed.
    """
    if reason := why_not(scene):
        raise ConfigurationError(_refusal(scene, reason))
    try:
        with open_real_service(scene) as service:
            theatre = _Theatre(scene, service, simulated)
            try:
                theatre.play()
            finally:
                theatre.close()
            return theatre.record
    except ServerError as error:
        message = f"--real needs the servers of the scene on this machine: {str(error).partition(chr(10))[0]}"
        raise ConfigurationError(message) from error


def _refusal(scene: Scene, reason: str) -> str:
    return f"--real cannot play {scene.title!r} on {scene.backends[0]}: {reason}"


def _finishes(steps: Collection[Step], client: str, simulated: Record) -> Iterator[Instant]:
    """Tell for each step that a client does itself when it had done it in the simulation; `inf`: never."""
    waits = iter([wait for wait in simulated.waits if wait.client == client])
    pauses = [span for span in simulated.spans if span.lane == client and span.kind == "paused"]
    now = 0.0
    for step in steps:
        if step.on_node or step.who != client or step.action in _DONE_TO_CLIENTS:
            continue
        now = max(now, step.at + step.delay)
        for pause in pauses:
            if pause.start <= now < pause.end:
                now = pause.end
        if step.action in {"acquire", "lead"}:
            wait = next(waits, None)
            now = inf if wait is None or wait.end is None else max(now, wait.end)
        yield now


class _Actor:
    """One client process, and the orders that it has not done yet."""

    def __init__(self, theatre: _Theatre, name: str, finishes: Iterator[Instant], connection: dict[str, Any]) -> None:
        self.name = name
        self.paused = False
        self.dead = False
        self.grant: Grant | None = None
        self.grants_count = 0
        self.wait: Wait | None = None
        self.pending: list[Instant] = []
        self.begun = 0
        self.sent = 0
        self._finishes = finishes
        self._theatre = theatre
        self._process = subprocess.Popen(
            [sys.executable, "-P", real_client.__file__, json.dumps(connection)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def begins(self) -> bool:
        """Whether it has begun all that it could: the first of its orders."""
        return self.begun > self.sent - len(self.pending) or not self.pending

    def order(self, **order: Any) -> None:
        """Have a step done."""
        finish = next(self._finishes)
        if not self.dead:
            self.pending.append(finish)
            self.sent += 1
            self.send(order)

    def send(self, value: object) -> None:
        """Write a line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Stop it, let it go on, or kill it."""
        self._process.send_signal(number)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._theatre.heard(self, json.loads(line))


class _StorageServer(socketserver.ThreadingTCPServer):
    """What the lock protects, where clients send their writes."""

    daemon_threads = True

    def __init__(self, receive: Callable[[dict[str, Any]], bool]) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                try:
                    for line in self.rfile:
                        accepted = receive(json.loads(line))
                        self.wfile.write(b"accepted\n" if accepted else b"refused\n")
                except OSError:
                    return  # the client died

        super().__init__(("127.0.0.1", 0), Handler)
        self.host, self.port = "127.0.0.1", int(self.server_address[1])
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()


class _Theatre:
    """One measured scene. All that happens is taken down under one lock."""

    def __init__(self, scene: Scene, service: RealService, simulated: Record) -> None:
        self.scene = scene
        self.record = Record(scene.ttl)
        nodes = scene.backends[0].nodes
        self.record.lanes += [Lane(name, "client", name) for name in scene.clients]
        self.record.lanes += [Lane(name, "server", label_of(name)) for name in nodes]
        self._steps = steps_of(scene)
        if any(step.action == "write" for step in self._steps):
            self.record.lanes.append(Lane("storage", "storage", "storage"))
        self._service = service
        self._storage = Storage(self)
        self._changed = threading.Condition()
        self._ready = 0
        self._unable = ""
        self._start = inf
        self._at: float | None = None
        self._closing = threading.Event()
        self._owners: dict[str, str] = {}
        self._open_spans: dict[tuple[SpanKind, str], Span] = {}
        self._delayed: set[str] = {step.who for step in self._steps if step.delay}
        self._storage_server = _StorageServer(self._received)
        self._storage_roads = {
            name: Road(self._storage_server.host, self._storage_server.port).start() for name in sorted(self._delayed)
        }
        self.actors = {
            name: _Actor(self, name, _finishes(self._steps, name, simulated), self._connection(name))
            for name in scene.clients
        }
        self._watchers = [threading.Thread(target=self._watch_server, args=(name,), daemon=True) for name in nodes]

    def _connection(self, client: str) -> dict[str, Any]:
        """Say how a client connects."""
        storage = self._storage_roads.get(client) or self._storage_server
        return {
            "client": client,
            "url": self._service.url_for(client),
            "lock": NAME,
            "key": lock_key("lockkit", NAME),
            "ttl": self.scene.ttl,
            "recipe": self.scene.backends[0].option("recipe"),
            "storage": [storage.host, storage.port],
        }

    # -- what `Storage` needs of a stage -------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the start; of the event that is being taken down."""
        return time.monotonic() - self._start if self._at is None else self._at

    @property
    def world(self) -> _Theatre:
        """Stands for the simulated world."""
        return self

    def mark(self, lane: str, text: str, tone: Tone = "plain") -> Mark:
        """Write a line of the story."""
        mark = Mark(self.now, lane, text, tone)
        self.record.marks.append(mark)
        return mark

    # -- the play ------------------------------------------------------------------------------------------------------

    def play(self) -> None:
        """Let it happen."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready == len(self.actors) or bool(self._unable), 2 * PATIENCE)
            if self._ready < len(self.actors):
                message = f"--real: a client could not connect: {self._unable or 'its process did not start'}"
                raise ConfigurationError(message)
        self._start = time.monotonic()
        for watcher in self._watchers:
            watcher.start()
        numbers = count()
        self._todo = [(step.at, next(numbers), "begin", step) for step in self._steps]
        for step in self._steps:
            if step.seconds is not None or step.delay:
                self._todo.append((step.at + (step.seconds or step.delay), next(numbers), "end", step))
        heapq.heapify(self._todo)
        while self._todo:
            at, _, part, step = heapq.heappop(self._todo)
            time.sleep(max(0.0, at - self.now))
            self._let_finish(at, self._before(part, step))
            if part == "begin" and step.action == "pause" and not step.on_node:
                self._wait_for(lambda actor=self.actors[step.who]: actor.begins)  # type: ignore[misc]  # a bool
            {"begin": self._begin, "end": self._end, "rejoin": self._rejoin}[part](step)
        self._let_finish(inf, self.actors.values())
        time.sleep(max(0.05 * self.scene.ttl, (self.scene.until or 0.0) - self.now))
        self._finish()

    def _before(self, part: str, step: Step) -> list[_Actor]:
        """Name those that finish what comes before it first."""
        everybody = list(self.actors.values())
        if step.on_node:
            return everybody if part == "begin" else []
        if part == "begin" and step.action in _DONE_TO_CLIENTS:
            return [self.actors[step.who]]
        if step.action == "write" or part == "end":
            return [actor for actor in everybody if actor.name != step.who]
        return []

    def _let_finish(self, at: Instant, actors: Collection[_Actor]) -> None:
        """Wait until clients have done what they had done by then; not for those that stand still, nor for ever."""
        self._wait_for(
            lambda: all(actor.paused or actor.dead or all(one >= at for one in actor.pending) for actor in actors)
        )

    def _wait_for(self, happened: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(happened, 3 * self.scene.ttl)

    def _begin(self, step: Step) -> None:
        if step.on_node:
            self._begin_node(step)
            return
        with self._changed:
            actor = self.actors[step.who]
            if step.action == "pause":
                actor.paused = True
                self.mark(step.who, f"{step.who} is paused: its program stands still and cannot know.", "fault")
                self._span("paused", step.who)
                actor.signal(signal.SIGSTOP)
            elif step.action == "kill":
                self._kill(actor)
            elif step.action == "cut":
                self._cut(step)
            else:
                self._order(actor, step)
        if step.action in _DONE_TO_CLIENTS | {"clock"}:
            self.record.faults.add(f"client {step.action}")

    def _order(self, actor: _Actor, step: Step) -> None:
        if step.action == "clock":
            ahead = "ahead" if step.by > 0 else "back"
            effect = "" if self.scene.backends[0].kind == "by-hand" else " lockkit does not look at it."
            text = f"{actor.name}'s time of day jumps {ahead} by {abs(step.by):g} s.{effect}"
            self.mark(actor.name, text, "fault")
        if step.delay:
            self._storage_roads[actor.name].blackhole(to_client=False)
        actor.order(do=step.action, timeout=step.timeout, check=step.check, renew=step.renew, by=step.by)

    def _kill(self, actor: _Actor) -> None:
        actor.signal(signal.SIGKILL)
        actor.dead = True
        self.mark(actor.name, f"{actor.name} dies.", "fault")
        self.record.dead[actor.name] = self.now
        if actor.grant is not None and actor.grant.noticed is None:
            actor.grant.noticed, actor.grant.how = self.now, "died"

    def _cut(self, step: Step) -> None:
        what = " and ".join(map(label_of, step.nodes)) if step.nodes else "the lock service"
        self.mark(step.who, f"{step.who} is cut off from {what}.", "fault")
        self._span("cut", step.who, note=f"cut off from {what}")
        self._service.cut(step.who, step.nodes)

    def _begin_node(self, step: Step) -> None:
        name, label = step.who, label_of(step.who)
        self.record.faults.add(f"node {step.action}" + (" without data" if step.lose_data else ""))
        whole = len(self.scene.backends[0].nodes) > 1
        texts = {
            "stop": f"{label} crashes{' and loses its data' if step.lose_data else ''}.",
            "pause": f"{label} stops answering.",
            "lag": "Replication stalls: the replica gets nothing new.",
            "failover": f"{label}{'' if whole else chr(39) + 's leader'} crashes.",
        }
        with self._changed:
            self.mark(name, texts[step.action], "fault")
            if step.action in {"stop", "pause", "failover"}:
                self._span("paused" if step.action == "pause" else "down", name)
        if step.action == "stop":
            self._service.stop(name, lose_data=step.lose_data)
        elif step.action == "pause":
            self._service.pause(name)
        elif step.action == "lag":
            self._service.lag(stall=True)
        else:
            self._service.fail(name)

    def _span(self, kind: SpanKind, lane: str, *, note: str = "") -> None:
        span = self._open_spans[kind, lane] = Span(lane, kind, self.now, inf, note=note)
        self.record.spans.append(span)

    def _end(self, step: Step) -> None:
        if step.on_node:
            self._end_node(step)
            return
        with self._changed:
            actor = self.actors[step.who]
            if step.action == "write":
                self._storage_roads[step.who].heal()
                return
            self._close_span("cut" if step.action == "cut" else "paused", step.who)
            if step.action == "cut":
                self._service.heal(step.who, step.nodes)
            if actor.dead:
                return
            if step.action == "cut":
                self.mark(step.who, f"{step.who} is connected again.")
            else:
                self.mark(step.who, f"{step.who} runs again.")
                actor.paused = False
                actor.signal(signal.SIGCONT)

    def _end_node(self, step: Step) -> None:
        name, label = step.who, label_of(step.who)
        several = len(self.scene.backends[0].nodes) > 1
        if step.action == "stop":
            self._service.start(name)
        elif step.action == "lag":
            self._service.lag(stall=False)
        elif step.action == "failover":
            self._service.promote()
        with self._changed:
            if step.action == "stop":
                self.mark(name, f"{label} is back{', empty' if step.lose_data else ' with its data'}.")
                self._close_span("down", name)
            elif step.action == "pause":
                self.mark(name, f"{label} answers again.")
                self._close_span("paused", name)
            elif step.action == "lag":
                self.mark(self.scene.backends[0].nodes[-1], "Replication goes on.")
            elif several:
                replica = self.scene.backends[0].nodes[-1]
                self.mark(replica, f"{replica} is promoted to master.", "fault")
                heapq.heappush(self._todo, (self.now + REJOIN_SHARE * self.scene.ttl, -1, "rejoin", step))
            else:
                self.mark(name, "The members elect a new leader, which has everything.")
                self._close_span("down", name)
        if step.action == "pause":
            self._service.resume(name)

    def _rejoin(self, step: Step) -> None:
        self._service.rejoin()
        with self._changed:
            self.mark(step.who, f"{step.who} is back, as a replica.")
            self._close_span("down", step.who)

    def _close_span(self, kind: SpanKind, lane: str) -> None:
        self._open_spans.pop((kind, lane)).end = self.now

    # -- what the storage gets -----------------------------------------------------------------------------------------

    def _received(self, line: dict[str, Any]) -> bool:
        """Take down a write when it arrives, after the grant that it was made under."""
        actor = self.actors[line["client"]]
        with self._changed:
            self._changed.wait_for(lambda: actor.grants_count >= line["grant"], PATIENCE)
            assert actor.grant is not None, "it has a lease"
            message = Message(actor.name, "storage", line["sent"] - self._start, None, "write")
            self.record.messages.append(message)
            return self._storage.receive(actor.grant, message)

    # -- what the clients report ---------------------------------------------------------------------------------------

    def heard(self, actor: _Actor, event: dict[str, Any]) -> None:
        """Take down what a client has reported."""
        with self._changed:
            self._at = None if self._start == inf else event["at"] - self._start
            getattr(self, f"_heard_{event['what']}")(actor, event)
            self._at = None
            self._changed.notify_all()

    def _heard_ready(self, actor: _Actor, event: dict[str, Any]) -> None:
        del actor, event
        self._ready += 1

    def _heard_unable(self, actor: _Actor, event: dict[str, Any]) -> None:
        self._unable = f"{actor.name}: {event['error']}"

    def _heard_begins(self, actor: _Actor, event: dict[str, Any]) -> None:
        del event
        actor.begun += 1

    def _heard_done(self, actor: _Actor, event: dict[str, Any]) -> None:
        del event
        actor.pending.pop(0)

    def _heard_asks(self, actor: _Actor, event: dict[str, Any]) -> None:
        del event
        actor.wait = Wait(actor.name, self.now)
        self.record.waits.append(actor.wait)

    def _heard_granted(self, actor: _Actor, event: dict[str, Any]) -> None:
        assert actor.wait is not None, "it has asked"
        actor.wait.end, actor.wait.granted = self.now, True
        left = inf if event["left"] is None else event["left"]
        actor.grant = Grant(actor.name, event["token"], self.now, self.now + left)
        actor.grants_count += 1
        self._owners[event["owner"]] = actor.name
        self.record.grants.append(actor.grant)
        token = "" if event["token"] is None else f": {{token:{event['token']}}}"
        leads = any(step.action == "lead" and step.who == actor.name for step in self._steps)
        self.mark(actor.name, f"{actor.name} {'leads' if leads else 'gets the lock'}{token}.")

    def _heard_failed(self, actor: _Actor, event: dict[str, Any]) -> None:
        assert actor.wait is not None, "it has asked"
        actor.wait.end = self.now
        self.mark(actor.name, f"{actor.name} does not get the lock ({event['error']}).", "notice")

    def _heard_renewed(self, actor: _Actor, event: dict[str, Any]) -> None:
        if actor.grant is not None and actor.grant.token == event["token"] and actor.grant.noticed is None:
            actor.grant.valid_until = self.now + event["left"]

    def _heard_must_stop(self, actor: _Actor, event: dict[str, Any]) -> None:
        grant = actor.grant
        if grant is not None and grant.token == event["token"] and not grant.how:
            self.mark(actor.name, f"{actor.name} must stop: the grace begins. It stops leading.", "good")
            self.record.spans.append(Span(actor.name, "stopping", self.now, grant.valid_until, actor.name))

    def _heard_checked(self, actor: _Actor, event: dict[str, Any]) -> None:
        held = event["left"] is not None
        text = f": {event['left']:.1f} s left." if held else ": lost. It stops here."
        self.mark(actor.name, f"{actor.name} checks its lease{text}", "plain" if held else "good")

    def _heard_unwritten(self, actor: _Actor, event: dict[str, Any]) -> None:
        text = "looks at its lease before it writes: lost. It does not write."
        if not event["held"]:
            text = "has no lock, and does not write."
        self.mark(actor.name, f"{actor.name} {text}", "good")

    def _heard_writes(self, actor: _Actor, event: dict[str, Any]) -> None:
        del event
        if actor.name in self._delayed:
            self.mark(actor.name, f"{actor.name} sends a write, and the network holds it up.", "fault")
            self.record.faults.add("message late")

    def _heard_releases(self, actor: _Actor, event: dict[str, Any]) -> None:
        del event
        by_hand = self.scene.backends[0].kind == "by-hand"
        text = "releases: it deletes the key, without looking whose it is." if by_hand else "releases the lock."
        self.mark(actor.name, f"{actor.name} {text}")
        if actor.grant is not None and actor.grant.noticed is None:
            actor.grant.noticed, actor.grant.how = self.now, "released"

    def _heard_late(self, actor: _Actor, event: dict[str, Any]) -> None:
        del event
        self.mark(actor.name, f"{actor.name}'s release is too late, and lockkit says so (LockLost).", "good")

    def _heard_unanswered(self, actor: _Actor, event: dict[str, Any]) -> None:
        del event
        self.mark(actor.name, f"The server does not answer {actor.name}'s release.", "notice")

    def _heard_lost(self, actor: _Actor, event: dict[str, Any]) -> None:
        if actor.grant is not None and actor.grant.token == event["token"] and actor.grant.noticed is None:
            actor.grant.noticed, actor.grant.how = self.now, event["reason"]
            text = f"{actor.name} learns that its lease is lost: {REASONS[event['reason']]}."
            self.mark(actor.name, text, "notice")

    # -- the servers' lanes --------------------------------------------------------------------------------------------

    def _watch_server(self, name: str) -> None:
        """Look at whom a server keeps the lock for, again and again."""
        span: Span | None = None
        look, close = self._service.look_at(name)
        while not self._closing.is_set():
            owner = look()
            with self._changed:
                if span is not None and span.who != owner:
                    span.end, span = self.now, None
                if span is None and owner:
                    offered = owner.startswith("next:")
                    span = Span(name, "offered" if offered else "kept", self.now, inf, owner)
                    self.record.spans.append(span)
            self._closing.wait(self._service.look_seconds)
        close()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._closing.set()
        for watcher in self._watchers:
            watcher.join(PATIENCE)
        with self._changed:
            record, end = self.record, self.now
            record.played = end
            for grant in record.grants:
                self._draw_grant(grant, end)
            for wait in record.waits:
                until = min(record.dead.get(wait.client, inf), end if wait.end is None else wait.end)
                if until - wait.start > WAIT_SHOWN * self.scene.ttl:
                    record.spans.append(Span(wait.client, "waits", wait.start, until, wait.client))
                    text = f"{wait.client} asks for the lock and has to wait."
                    record.marks.append(Mark(wait.start, wait.client, text))
            last = max([mark.at for mark in record.marks], default=end)
            record.end = max(last * 1.06, self.scene.until or 0.0, 1e-3)
            record.marks.sort(key=lambda mark: mark.at)
            record.overlaps += find_overlaps(record)
            for span in record.spans:
                span.end = min(span.end, record.end)
                # A Redlock's attempts have numbers, and a recipe keeps its deadline behind the client's name.
                owner = span.who.removeprefix("next:")
                span.who = self._owners.get(owner) or self._owners.get(owner.partition(".")[0], owner)
            self._start = -inf  # what is reported from now on is not part of it

    def _draw_grant(self, grant: Grant, end: float) -> None:
        record = self.record
        noticed = end if grant.noticed is None else grant.noticed
        valid_until = min(grant.valid_until, noticed)
        record.spans.append(Span(grant.client, "holds", grant.start, valid_until, grant.client, grant.token))
        if noticed > grant.valid_until + 0.03 * self.scene.ttl:
            record.spans.append(Span(grant.client, "believes", grant.valid_until, noticed, grant.client, grant.token))
            grant.paused_at_end = any(
                span.kind == "paused" and span.lane == grant.client and span.start <= grant.valid_until <= span.end
                for span in record.spans
            )
            if grant.paused_at_end:
                text = f"{grant.client}'s lease ends. {grant.client} stands still and does not know."
                record.marks.append(Mark(grant.valid_until, grant.client, text, "notice"))

    def close(self) -> None:
        """End all processes."""
        self._closing.set()
        for actor in self.actors.values():
            actor.close()
        for road in self._storage_roads.values():
            road.close()
        self._storage_server.close()
