"""Plays a scene: makes its world, has the clients do their steps and the faults happen, and takes everything down."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from math import inf
from typing import Final

from lockkit.aio import Lease
from lockkit.errors import LockError, LockLost, LockTimeout, NoQuorum
from lockkit.units import Seconds
from lockkit_tools.lab.by_hand import RECIPES, Recipe
from lockkit_tools.lab.record import Grant, Lane, Mark, Message, Overlap, Record, Span, SpanKind, Tone, Wait, Write
from lockkit_tools.lab.scenario import TTL, Scene, Step
from lockkit_tools.lab.services import NAME, ByHand, RecordingNetwork, Service, label_of, open_service
from lockkit_tools.simulation.network import Conditions
from lockkit_tools.simulation.world import Process, World

WAIT_SHOWN = 0.06 * TTL
"""A wait is part of the story if it is longer than this, seconds. Shorter ones are the network."""

REJOIN_SECONDS = 0.5 * TTL
"""When a former master comes back after another was promoted."""

REASONS: Final = {
    "expired": "its deadline has passed",
    "paused": "it did not run for longer than its lease",
    "taken": "the lock is another client's now",
    "gone": "the server does not know it any more",
}


def play(scene: Scene, seed: int) -> Record:
    """Run a scene."""
    stage, logger = Stage(scene, seed), logging.getLogger("lockkit")
    # The drawing shows what the engine would warn of.
    disabled, logger.disabled = logger.disabled, True
    try:
        stage.run()
    finally:
        stage.world.end()
        logger.disabled = disabled
    return stage.record


class Storage:
    """What the lock protects. Fenced, it refuses a token that is lower than the highest it has seen."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._newest_token = 0
        self._newest_number = -1
        self._newest_client = ""

    def receive(self, grant: Grant, message: Message) -> bool:
        """Accept or refuse a write of the holder of a grant; tell which."""
        stage, record = self._stage, self._stage.record
        now, number = stage.world.now, record.grants.index(grant)
        token = grant.token
        accepted = not (stage.scene.fenced and token is not None and token < self._newest_token)
        overwrote = accepted and number < self._newest_number
        late = now > grant.end + 1e-6
        record.writes.append(Write(now, grant.client, number, token, accepted, overwrote, late))
        message.arrives = now
        message.fate = "refused" if not accepted else "overwrote" if overwrote else "accepted"
        who = grant.client
        if not accepted:
            seen = f"storage has seen {{token:{self._newest_token}}}"
            stage.mark("storage", f"{who}'s write with {{token:{token}}} is REFUSED: {seen}.", "good")
        elif overwrote:
            stage.mark("storage", f"{who}'s old write REPLACES {self._newest_client}'s newer one: data is lost.", "bad")
        elif late:
            stage.mark("storage", f"{who}'s write is accepted, although its lease has ended.", "bad")
        else:
            stage.mark("storage", f"{who} writes: accepted.")
        if accepted:
            self._newest_token = max(self._newest_token, token or 0)
            if not overwrote:
                self._newest_number, self._newest_client = number, who
        return accepted


class Stage:
    """One run of a scene."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self.scene = scene
        self.record = Record()  # what has happened so far
        self.world = World(seed)
        self.network = RecordingNetwork(self.world, Conditions(latency=scene.latency), self.record)
        self.service: Service = open_service(self.world, self.network, self.record, scene)
        self.world.probe = self.service.look
        self.storage = Storage(self)
        self.actors = {name: Actor(self, name) for name in scene.clients}
        self.record.lanes += [Lane(name, "client", name) for name in scene.clients]
        self.record.lanes += [Lane(name, "server", label_of(name)) for name in self.service.nodes]
        if any(step.action == "write" for step in scene.steps):
            self.record.lanes.append(Lane("storage", "storage", "storage"))
        self._chance = self.world.chance("storage").uniform

    def run(self) -> None:
        """Let it happen."""
        last = 0.0
        for step in self.scene.steps:
            last = max(last, step.at + step.lasts + step.delay)
            if step.who in self.service.nodes:
                self.world.call_at(step.at, self._fault, step)
            elif step.who in self.actors:
                actor = self.actors[step.who]
                if step.action in {"pause", "kill", "cut", "clock"}:
                    self.world.call_at(step.at, actor.suffer, step)
                else:
                    actor.steps.append(step)
        for actor in self.actors.values():
            actor.process.start(actor.do_steps(), "steps")
        self.world.run(until=self.scene.until or last + 2.5 * TTL)
        assert not self.world.failures, self.world.failures
        self._finish()

    def mark(self, lane: str, text: str, tone: Tone = "plain") -> Mark:
        """Write a line of the story."""
        mark = Mark(self.world.now, lane, text, tone)
        self.record.marks.append(mark)
        return mark

    def latency(self) -> float:
        """Draw the time of a message to the storage."""
        return self._chance(*self.scene.latency)

    # -- what is done to nodes -----------------------------------------------------------------------------------------

    def _fault(self, step: Step) -> None:
        name, label = step.who, label_of(step.who)
        if step.action == "stop":
            self.mark(name, f"{label} crashes and loses its data.", "fault")
            self._span("down", name, step.lasts)
            self.service.nodes[name].stop(lose_data=True)
            self.world.call_in(step.lasts, self._start, name)
        elif step.action == "clock":
            self.mark(name, f"{label}'s clock jumps ahead by {step.by:g} s.", "fault")
            self.service.jump(name, step.by)
        elif step.action == "lag":
            self.mark(name, "Replication stalls: the replica gets nothing new.", "fault")
            self.service.set_lag(inf)
            self.world.call_in(step.lasts, self._catch_up, name)
        else:
            assert step.action == "failover", step
            *_, other = self.service.nodes
            who, longer = (f"{label}'s leader", 0.0) if other == name else (label, REJOIN_SECONDS)
            self.mark(name, f"{who} crashes.", "fault")
            self._span("down", name, step.lasts + longer)
            self.service.nodes[name].stop()
            self.world.call_in(step.lasts, self._promote, name, other)

    def _start(self, name: str) -> None:
        self.service.start(name)
        self.mark(name, f"{label_of(name)} is back, empty.")

    def _catch_up(self, name: str) -> None:
        self.service.set_lag(None)
        self.mark(name, "Replication goes on.")

    def _promote(self, name: str, other: str) -> None:
        if other == name:
            self.service.start(name)
            self.mark(name, "The members elect a new leader, which has everything.")
        else:
            self.service.promote()
            self.mark(other, f"{other} is promoted to master.", "fault")
            self.world.call_in(REJOIN_SECONDS, self._rejoin, name)

    def _rejoin(self, name: str) -> None:
        self.service.start(name)
        self.mark(name, f"{name} is back, as a replica.")

    def _span(self, kind: SpanKind, lane: str, seconds: Seconds) -> None:
        self.record.spans.append(Span(lane, kind, self.world.now, self.world.now + seconds))

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        record = self.record
        for actor in self.actors.values():
            actor.finish()
        self.service.finish()
        last = max(mark.at for mark in record.marks)
        record.end = self.scene.until or last + max(0.06 * last, 2 * self.scene.latency[1])
        record.marks.sort(key=lambda mark: mark.at)
        for span in record.spans:
            span.end = min(span.end, record.end)
        record.overlaps += _overlaps(record)
        record.spans[:] = [span for span in record.spans if span.start < record.end and span.end > span.start]


def _overlaps(record: Record) -> Iterator[Overlap]:
    """Yield from when to when two clients had valid leases."""
    for index, one in enumerate(record.grants):
        for other in record.grants[index + 1 :]:
            start, end = max(one.start, other.start), min(one.end, other.end, record.end)
            if end > start + 1e-6:
                yield Overlap(start, end, one.client, other.client)


class Actor:
    """One client: its process, its steps, and what it believes."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.stage = stage
        self.name = name
        self.process: Process = stage.world.process(name)
        self.process.probe = self._look
        self.steps: list[Step] = []
        self.clock_offset = 0.0
        self.recipe: Recipe | None = None
        if isinstance(stage.service, ByHand):
            self.recipe = RECIPES[stage.scene.backends[0].option("recipe")](self.process, stage.service)
        self._lease: Lease | None = None
        self._grant: Grant | None = None

    async def do_steps(self) -> None:
        """Do what it does itself."""
        for step in self.steps:
            if (seconds := step.at - self.stage.world.now) > 0:
                await self.process.waiter(seconds).park()
            if step.action in {"acquire", "lead"}:
                await self._acquire(step)
            elif step.action == "check":
                assert self._lease is not None, "a scene checks what it has"
                self._lease.check()
                self.stage.mark(self.name, f"{self.name} checks its lease: {self._lease.remaining():.1f} s left.")
            elif step.action == "write":
                await self._write(step)
            else:
                assert step.action == "release", step
                await self._release()

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def _acquire(self, step: Step) -> None:
        stage = self.stage
        wait = Wait(self.name, stage.world.now)
        stage.record.waits.append(wait)
        what = "the term" if step.action == "lead" else "the lock"
        try:
            if self.recipe is not None:
                valid_until = await self.recipe.acquire(lambda: stage.world.now + self.clock_offset)
                grant = Grant(self.name, None, stage.world.now, valid_until)
            else:
                lease = self._lease = await self._ask(step)
                valid_until = self.process.clock.true_time(lease._record.valid_until)
                grant = Grant(self.name, lease.token, stage.world.now, valid_until)
        except (LockTimeout, NoQuorum) as error:
            wait.end = stage.world.now
            stage.mark(self.name, f"{self.name} does not get {what}: {self._why(error)}.", "notice")
            return
        wait.end, wait.granted = stage.world.now, True
        if self._waited_long(wait):
            waiting = Mark(wait.start, self.name, f"{self.name} asks for {what} and has to wait.")
            stage.record.marks.append(waiting)
        self._grant = grant
        stage.record.grants.append(grant)
        token = "" if grant.token is None else f": {{token:{grant.token}}}"
        stage.mark(self.name, f"{self.name} {'leads' if step.action == 'lead' else 'gets the lock'}{token}.")

    async def _ask(self, step: Step) -> Lease:
        client = self.stage.service.connect(self.process)
        if step.action == "lead":
            term = await client.election(NAME).campaign()
            self.process.start(self._stop_in_time(term), "stop")
            return term
        return await client.lock(NAME).acquire(step.timeout)

    async def _stop_in_time(self, term: object) -> None:
        """Take down when a leader is told to stop, as its work would ask."""
        await term.must_stop(None)  # type: ignore[attr-defined]  # a Term
        grant = self._grant
        if grant is not None and not grant.how:
            stage = self.stage
            stage.mark(self.name, f"{self.name} must stop: the grace begins. It stops leading.", "good")
            stage.record.spans.append(Span(self.name, "stopping", stage.world.now, grant.valid_until, self.name))

    def _waited_long(self, wait: Wait) -> bool:
        end = self.stage.world.now if wait.end is None else wait.end
        return end - wait.start > WAIT_SHOWN + 8 * self.stage.scene.latency[1]

    async def _write(self, step: Step) -> None:
        stage, grant = self.stage, self._grant
        if grant is None:
            stage.mark(self.name, f"{self.name} has no lock, and does not write.", "good")
            return
        if step.check and self._lease is not None and not self._lease.held:
            stage.mark(self.name, f"{self.name} looks at its lease before it writes: lost. It does not write.", "good")
            return
        message = Message(self.name, "storage", stage.world.now, None, "write")
        stage.record.messages.append(message)
        if step.delay:
            stage.mark(self.name, f"{self.name} sends a write, and the network holds it up.", "fault")
        waiter = self.process.waiter(None)

        def arrive() -> None:
            accepted = stage.storage.receive(grant, message)
            stage.world.call_in(stage.latency(), waiter.wake, accepted)

        stage.world.call_in(step.delay or stage.latency(), arrive)
        await waiter.park()

    async def _release(self) -> None:
        stage, grant = self.stage, self._grant
        if grant is None:
            return
        if self.recipe is not None:
            grant.noticed, grant.how = stage.world.now, "released"
            stage.mark(self.name, f"{self.name} releases: it deletes the key, without looking whose it is.")
            await self.recipe.release()
            return
        assert self._lease is not None, "granted by lockkit"
        lost = self._lease.lost
        mark = stage.mark(self.name, f"{self.name} releases the lock.")
        try:
            await self._lease.release()
        except LockLost:
            mark.text, mark.tone = f"{self.name} releases: too late, and lockkit says so (LockLost).", "good"
        assert not lost or mark.tone == "good", "a lost lease is never released"

    # -- what is done to it --------------------------------------------------------------------------------------------

    def suffer(self, step: Step) -> None:
        """Have a fault done to it."""
        stage, process = self.stage, self.process
        now = stage.world.now
        end = now + (step.lasts or inf)
        if step.action == "pause":
            process.pause()
            stage.mark(self.name, f"{self.name} is paused: its program stands still and cannot know.", "fault")
            stage.record.spans.append(Span(self.name, "paused", now, end))
            stage.world.call_at(end, self._resume)
        elif step.action == "kill":
            stage.mark(self.name, f"{self.name} dies.", "fault")
            stage.record.dead[self.name] = now
            process.crash()
            assert self._grant is not None, "a holder dies"
            self._grant.noticed, self._grant.how = now, "died"
        elif step.action == "cut":
            nodes = [stage.service.nodes[name] for name in step.nodes or stage.service.nodes]
            for node in nodes:
                stage.network.cut(process, node)
            from_what = " and ".join(label_of(node.name) for node in nodes) if step.nodes else "the lock service"
            stage.mark(self.name, f"{self.name} is cut off from {from_what}.", "fault")
            stage.record.spans.append(Span(self.name, "cut", now, end, note=f"cut off from {from_what}"))
            if step.lasts:
                stage.world.call_at(end, self._heal, step)
        else:
            assert step.action == "clock", step
            self.clock_offset += step.by
            effect = "" if self.recipe is not None else " lockkit does not look at it."
            stage.mark(self.name, f"{self.name}'s time of day jumps ahead by {step.by:g} s.{effect}", "fault")

    def _resume(self) -> None:
        # Before anything runs: what it finds follows in the story.
        self.stage.mark(self.name, f"{self.name} runs again.")
        self.process.resume()

    def _heal(self, step: Step) -> None:
        for name in step.nodes or self.stage.service.nodes:
            self.stage.network.heal(self.process, self.stage.service.nodes[name])
        self.stage.mark(self.name, f"{self.name} is connected again.")

    # -- what it believes ----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """
        Look at what the client believes after each of its steps.

        At the fields: asking the lease would make it notice its loss.
        """
        grant, lease = self._grant, self._lease
        if grant is None or lease is None or grant.noticed is not None:
            return
        record, now = lease._record, self.stage.world.now
        grant.valid_until = self.process.clock.true_time(record.valid_until)
        if record.lost_reason is not None:
            grant.noticed, grant.how = now, record.lost_reason
            reason = REASONS[record.lost_reason]
            self.stage.mark(self.name, f"{self.name} learns that its lease is lost: {reason}.", "notice")
        elif record.released:
            grant.noticed, grant.how = now, "released"

    def finish(self) -> None:
        """Make spans of what it believed, and of its waits."""
        record, now = self.stage.record, self.stage.world.now
        if (grant := self._grant) is not None:
            noticed = now if grant.noticed is None else grant.noticed
            record.spans.append(
                Span(self.name, "holds", grant.start, min(grant.valid_until, noticed), self.name, grant.token)
            )
            if noticed > grant.valid_until + 0.005 * TTL:
                record.spans.append(Span(self.name, "believes", grant.valid_until, noticed, self.name, grant.token))
                if any(
                    span.kind == "paused" and span.lane == self.name and span.start <= grant.valid_until <= span.end
                    for span in record.spans
                ):
                    text = f"{self.name}'s lease ends. {self.name} stands still and does not know."
                    record.marks.append(Mark(grant.valid_until, self.name, text, "notice"))
        for wait in record.waits:
            if wait.client == self.name and self._waited_long(wait):
                end = min(record.dead.get(self.name, inf), now if wait.end is None else wait.end)
                record.spans.append(Span(self.name, "waits", wait.start, end, self.name))
                if wait.end is None:
                    record.marks.append(Mark(wait.start, self.name, f"{self.name} asks for the lock and has to wait."))

    def _why(self, error: LockError) -> str:
        if isinstance(error, LockTimeout) and self.stage.scene.backends[0].option("replicas"):
            return "the replica never confirmed the grant, so lockkit undid it"
        if isinstance(error, LockTimeout):
            return "another client held it for the whole wait"
        return "too few nodes granted it in time"
