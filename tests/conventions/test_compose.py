"""The Compose files: what can be said of them without a Docker engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockkit.configuration import registry
from lockkit.url import parse
from lockkit_tools.servers.kinds import KINDS

COMPOSE = Path(__file__).parents[2] / "compose"
README = (COMPOSE / "README.md").read_text()
DOCUMENTS: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted(COMPOSE.glob("*.yaml"))
}
SINGLE = {name: document for name, document in DOCUMENTS.items() if name != "all"}
SERVICES = {
    (name, service): definition
    for name, document in SINGLE.items()
    for service, definition in document["services"].items()
}
URLS = {
    name: url for name, url in re.findall(r"^\| `(\w+)\.yaml` \|.*\| `(\S+)` \|$", README, re.MULTILINE) if "://" in url
}
PORT = re.compile(r"127\.0\.0\.1:(\d+):\d+")

each_file = pytest.mark.parametrize("name", SINGLE)
each_service = pytest.mark.parametrize("key", SERVICES, ids="/".join)


def published(name: str) -> list[int]:
    """The ports of this machine that a file publishes."""
    found = [str(port) for service in SINGLE[name]["services"].values() for port in service.get("ports", [])]
    assert all(PORT.fullmatch(port) for port in found), found
    return [int(port.split(":")[1]) for port in found]


def test_there_are_files_and_the_readme_names_each() -> None:
    """A file that nobody lists is not found by anybody."""
    assert {"redis", "sentinel", "redlock", "zookeeper", "etcd", "postgresql", "mariadb", "all"} <= set(DOCUMENTS)
    assert all(f"`{name}.yaml`" in README for name in DOCUMENTS)
    assert set(URLS) == set(SINGLE)


def test_kinds_of_servers_and_compose_files_name_the_same_images() -> None:
    """One pinned tag of each server; MySQL has no Compose file."""
    composed = {service["image"] for service in SERVICES.values() if "image" in service}

    assert {kind.image.name for kind in KINDS.values() if kind.image} == composed | {"mysql:8"}


@each_file
def test_ports_are_for_this_machine_only(name: str) -> None:
    """A lock server for development is nobody else's business."""
    assert published(name)


def test_no_two_services_want_the_same_port() -> None:
    """All files can be up at once, as all.yaml has them."""
    ports = [port for name in SINGLE for port in published(name)]

    assert len(ports) == len(set(ports))


@each_service
def test_services_are_pinned_and_checked(key: tuple[str, str]) -> None:
    """``latest`` is another server each week; ``up --wait`` needs a health check, and Compose words that are text."""
    service = SERVICES[key]
    check = service["healthcheck"]["test"]

    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d[\w.-]*", service["image"])
    assert check[0] == "CMD"
    words = [*check, *service.get("command", []), *service.get("entrypoint", [])]
    assert all(isinstance(word, str) for word in words), "YAML turns yes into a truth and 6379 into a number"


@each_service
def test_references_lead_somewhere(key: tuple[str, str]) -> None:
    """Volumes, the services waited for, and shared networks are in the same file."""
    document, service = SINGLE[key[0]], SERVICES[key]
    mode = service.get("network_mode", "")

    assert {volume.partition(":")[0] for volume in service.get("volumes", [])} <= set(document.get("volumes", {}))
    assert set(service.get("depends_on", {})) <= set(document["services"])
    assert not mode or mode.removeprefix("service:") in document["services"]
    assert not (mode and service.get("ports")), "who shares a network cannot publish"


@pytest.mark.parametrize("name", ["redlock", "zookeeper", "etcd", "sentinel"])
def test_majorities_are_of_an_odd_number(name: str) -> None:
    """Three, or five where lockkit is the one who counts."""
    numbered = [service for service in SINGLE[name]["services"] if re.fullmatch(rf"{name}-\d", service)]

    assert len(numbered) == (5 if name == "redlock" else 3)


@pytest.mark.parametrize("name", ["zookeeper", "etcd"])
def test_members_know_each_other(name: str) -> None:
    """Each has the list of all, and a number or name of its own."""
    services = SINGLE[name]["services"]
    peers = {"zookeeper": "ZOO_SERVERS", "etcd": "ETCD_INITIAL_CLUSTER"}[name]
    own = {"zookeeper": "ZOO_MY_ID", "etcd": "ETCD_NAME"}[name]

    assert all(all(f"{other}:" in service["environment"][peers] for other in services) for service in services.values())
    assert len({service["environment"][own] for service in services.values()}) == len(services)


def test_sentinels_watch_the_master() -> None:
    """The address that they tell clients is published, and so are their own."""
    services = SINGLE["sentinel"]["services"]
    ports = published("sentinel")
    commands = [" ".join(services[f"sentinel-{number}"]["command"]) for number in (1, 2, 3)]

    assert all("monitor mymaster 127.0.0.1 6390 2" in command for command in commands)
    assert sorted(int(re.findall(r"port (\d+)", command)[0]) for command in commands) == ports[2:]
    assert [services[name]["command"][2] for name in ("sentinel-master", "sentinel-replica")] == ["6390", "6391"]
    assert ports[:2] == [6390, 6391]


@each_file
def test_url_of_the_readme_leads_to_the_ports(name: str) -> None:
    """What the README and the file's own head say can be copied."""
    url = parse(URLS[name])
    head = (COMPOSE / f"{name}.yaml").read_text().split("\nname:")[0]

    registry.find(url.scheme)
    assert {host.port for host in url.hosts} <= set(published(name))
    assert all(host.host == "127.0.0.1" for host in url.hosts)
    assert f"docker compose -f compose/{name}.yaml up --wait" in head
    assert f"LOCKKIT_URL={URLS[name]} " in head


def test_all_has_every_service_in_its_profiles() -> None:
    """Nothing is written twice: each is taken from its file, and started by ``test`` and by that file's name."""
    services = DOCUMENTS["all"]["services"]
    volumes = [volume for document in SINGLE.values() for volume in document.get("volumes", {})]

    assert services == {
        service: {"extends": {"file": f"{name}.yaml", "service": service}, "profiles": ["test", name]}
        for name, service in SERVICES
    }
    assert sorted(DOCUMENTS["all"]["volumes"]) == sorted(volumes)
    assert len(volumes) == len(set(volumes))
