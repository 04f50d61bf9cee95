"""ZooKeeper and etcd, asked over their own ports for administrators."""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from pathlib import Path

from lockkit_tools.bench.machine import file_system
from lockkit_tools.bench.observer import Observer
from lockkit_tools.servers.readiness import etcd_metrics, four_letters


class _Counting(Observer):
    """Sums over all members, of two counters that each has."""

    def __init__(self, addresses: list[tuple[str, int]]) -> None:
        self._addresses = addresses
        self._at_first = self._counts()
        self._at_begin = self._at_first
        self._began = 0.0

    def begin(self) -> None:
        self._at_begin = self._counts()
        self._began = time.monotonic()

    def end(self) -> dict[str, float]:
        seconds = time.monotonic() - self._began
        now = self._counts()
        if now is None or self._at_begin is None or self._at_first is None:
            return {}
        return {
            "commands_per_second": max(0.0, now[0] - self._at_begin[0]) / seconds,
            "connections": max(0.0, now[1] - self._at_first[1]),
        }

    @abstractmethod
    def _counts(self) -> tuple[float, float] | None:
        """Give commands so far, and connections now; None if a member does not tell."""


class ZooKeeperObserver(_Counting):
    """
    By the words ``mntr``, ``srvr`` and ``conf``, where ``4lw.commands.whitelist`` allows them.

    Packets are counted, so that the pings of sessions are commands too.
    """

    def about(self) -> dict[str, str]:
        """See `Observer.about`. Of the first member."""
        host, port = self._addresses[0]
        version = re.search(r"version: ([\d.]+)", four_letters(host, port, "srvr"))
        about = {"server": "ZooKeeper", "version": version[1] if version else "", **_nodes(self._addresses)}
        conf = dict(line.split("=", 1) for line in four_letters(host, port, "conf").splitlines() if "=" in line)
        if found := file_system(Path(conf["dataLogDir"])) if "dataLogDir" in conf else "":
            about["data on"] = found
        return about

    def _counts(self) -> tuple[float, float] | None:
        packets = connections = 0.0
        for host, port in self._addresses:
            lines = [line.split("\t") for line in four_letters(host, port, "mntr").splitlines() if "\t" in line]
            seen = {words[0]: words[1] for words in lines}
            if "zk_packets_received" not in seen:
                return None  # not on the list of words that it answers
            packets += float(seen["zk_packets_received"])
            connections += float(seen["zk_num_alive_connections"])
        return packets, connections


class EtcdObserver(_Counting):
    """
    By its metrics.

    Messages that came in over gRPC are counted, so that keep-alives of leases are commands too; connections are the
    growth of its open files.
    """

    def about(self) -> dict[str, str]:
        """See `Observer.about`. Of the first member."""
        metrics = etcd_metrics(*self._addresses[0])
        version = next((name for name in metrics if name.startswith("etcd_server_version{")), "")
        about = {"server": "etcd", "version": version.partition('"')[2].partition('"')[0]}
        about |= _nodes(self._addresses)
        syncs = float(metrics.get("etcd_disk_wal_fsync_duration_seconds_count", 0))
        if syncs:
            each_ms = float(metrics["etcd_disk_wal_fsync_duration_seconds_sum"]) / syncs * 1000
            about["fsync of the log"] = f"{each_ms:.2f} ms on average"
        return about

    def _counts(self) -> tuple[float, float] | None:
        commands = files = 0.0
        for address in self._addresses:
            metrics = etcd_metrics(*address)
            commands += sum(
                float(value) for name, value in metrics.items() if name.startswith("grpc_server_msg_received_total")
            )
            files += float(metrics.get("process_open_fds", 0))
        return commands, files


def _nodes(addresses: list[tuple[str, int]]) -> dict[str, str]:
    return {"nodes": str(len(addresses))} if len(addresses) > 1 else {}
