"""Members that elect a leader among them: what etcd and ZooKeeper have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from lockkit_tools.servers.base import Server, ServerGroup
from lockkit_tools.servers.errors import ServerError


class Member(Server):
    """A server that may lead others."""

    @abstractmethod
    def leads(self) -> bool:
        """Whether this member is the leader, as it sees itself."""


M = TypeVar("M", bound=Member)


class Ensemble(ServerGroup, Generic[M]):
    """
    Members that elect a leader.

    A single member is started with `Server.start` only while the others are a majority; after more were lost, start the
    group: its members wait for each other.

    Args:
        members: All of them; a majority must run.
    """

    def __init__(self, members: Sequence[M]) -> None:
        self.members = list(members)

    @property
    def servers(self) -> Sequence[M]:
        return self.members

    @property
    def url(self) -> str:
        """The scheme of one member's URL, with all members."""
        scheme = self.members[0].url.partition(":")[0]
        return f"{scheme}://{','.join(member.address for member in self.members)}"

    @property
    def leader(self) -> M:
        """The member that leads now."""
        for member in self.members:
            if member.running and member.leads():
                return member
        raise ServerError(f"no member of the {self.kind} leads")

    @property
    def followers(self) -> list[M]:
        """The members that run and do not lead."""
        leader = self.leader
        return [member for member in self.members if member.running and member is not leader]
