"""Elections: one leader, whom everybody sees, and who stops when its term ends."""

from __future__ import annotations

from lockkit import aio
from lockkit.testing.conformance.base import Cases, FaceDriver, case
from lockkit.testing.timing import PATIENCE


class Elections(Cases):
    """Campaigning, leading, resigning and watching."""

    backend_part = (
        "An election is a lock whose metadata carries the value of the leader: look at `try_acquire`, `wait`, "
        "`holders` and `update`."
    )

    @case()
    async def test_leaders_are_visible_in_order(self, driver: FaceDriver) -> None:
        """With owner, term and value, by asking and by observing; terms increase, None while nobody leads."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        contest = other.election(name, ttl=driver.timing.long, value={"address": "other:80"})
        # It looks more often at an election with a short ttl.
        leaders = other.election(name, ttl=driver.timing.kept).observe()
        assert await anext(leaders) is None
        assert await contest.leader() is None

        first = await client.election(name, ttl=driver.timing.long, value="client:80").campaign(PATIENCE)
        seen = await anext(leaders)
        assert seen is not None
        assert (seen.owner, seen.term, seen.value) == (first.owner, first.token, "client:80")
        assert await contest.leader() == seen

        await first.resign()
        assert await anext(leaders) is None

        async with await contest.campaign(PATIENCE) as second:
            seen = await anext(leaders)
            assert seen is not None
            assert (seen.term, seen.value) == (second.token, {"address": "other:80"})
        assert second.token > first.token

    @case()
    async def test_candidate_leads_when_the_leader_resigns(self, driver: FaceDriver) -> None:
        """With a later term; the former leader must stop."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        first = await client.election(name, ttl=driver.timing.long).campaign(PATIENCE)
        assert not await first.must_stop()
        waiting = driver.spawn(_campaign(other.election(name, ttl=driver.timing.long)))
        await driver.until_waiting(other, name)

        await first.resign()

        second = await waiting.result()
        assert second.token > first.token
        assert await first.must_stop()
        assert not await second.must_stop()
        await second.resign()

    @case()
    async def test_leader_must_stop_when_its_term_is_lost(self, driver: FaceDriver) -> None:
        """And `run` campaigns again."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        ttl = driver.timing.kept * 2
        terms: list[int] = []

        async def work(term: aio.Term) -> str:
            terms.append(term.token)
            if len(terms) == 1:
                assert await other.break_lock(name) or term.lost
                assert await term.must_stop(driver.timing.beyond(ttl))
                # By its deadline at the latest, and it must stop before that.
                await driver.eventually(lambda: term.lost, "the leader is notified of the loss")
            return "done"

        assert await client.election(name, ttl=ttl).run(work) == "done"

        assert terms[1] > terms[0]
        assert await other.holders(name) == []

    @case()
    async def test_stopped_candidate_leaves_nothing_behind(self, driver: FaceDriver) -> None:
        """It leaves the queue, and never leads."""
        name = driver.name()
        client, other = await driver.connect(), await driver.connect()
        stop = driver.stop_event()

        async def lead(term: aio.Term) -> int:
            return term.token

        async with await client.election(name, ttl=driver.timing.long).campaign(PATIENCE) as term:
            running = driver.spawn(other.election(name, ttl=driver.timing.long).run(lead, stop))
            await driver.until_waiting(other, name)
            stop.set()
            assert await running.result() is None
            assert not await term.must_stop()

        assert await client.holders(name) == []


async def _campaign(contest: aio.Election) -> aio.Term:
    return await contest.campaign(PATIENCE)
