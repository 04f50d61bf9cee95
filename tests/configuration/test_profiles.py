from __future__ import annotations

import os
import pickle
import pwd
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lockkit
import lockkit.aio
from lockkit import doctor
from lockkit.configuration import profiles
from lockkit.errors import ConfigurationError

PROFILES = """
[profiles.dev]
url = "memory://dev"

[profiles.prod]
url = "redis://:${PW}@h/0?ttl=7"
ttl = 20
prefix = "p:"
durable = true
"""
USUAL = '[profiles.default]\nurl = "memory://usual"'
PY_DEV = '[tool.lockkit.profiles.dev]\nurl = "memory://py"'


class Case(NamedTuple):
    """A call of `resolve` in the folder ``below/it``, and the URL, or the message of the error."""

    wanted: str
    files: Mapping[str, str] = {}
    environ: Mapping[str, str] = {}
    url: Any = None
    profile: Any = None


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory above the working directory, and an environment without settings of the machine."""
    (tmp_path / "below" / "it").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "below" / "it")
    for name in [name for name in os.environ if name.startswith("LOCKKIT_")]:
        monkeypatch.delenv(name)
    return tmp_path


def write(path: Path, text: str = PROFILES) -> Path:
    """Write a file of settings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def resolve(case: Case, root: Path, monkeypatch: pytest.MonkeyPatch) -> profiles.Settings:
    """Make what a case needs, and call."""
    for name, text in case.files.items():
        write(root / name, text)
    for name, value in case.environ.items():
        monkeypatch.setenv(name, value)
    return profiles.resolve(case.url, case.profile, {})


DEV = {"lockkit.toml": PROFILES}
FULL = {"lockkit.toml": f"{PROFILES}\n{USUAL}"}
BOTH = {"LOCKKIT_URL": "memory://b", "LOCKKIT_ENV": "prod"}
FOUND = {
    "url wins": Case("memory://a [the given url]", FULL, BOTH, "memory://a", "dev"),
    "profile is next": Case("memory://dev [profile 'dev' in ", FULL, BOTH, None, "dev"),
    "LOCKKIT_URL is next": Case("memory://b [LOCKKIT_URL]", FULL, BOTH),
    "LOCKKIT_ENV is next": Case("memory://dev [profile 'dev' in ", FULL, {"LOCKKIT_ENV": "dev"}),
    "the profile default is next": Case("memory://usual [profile 'default' in ", FULL),
    "files of this user": Case("file: [the default]"),
    "no file is read for a url": Case("memory:", {"lockkit.toml": "no TOML"}, url="memory:"),
    "nor for LOCKKIT_URL": Case("memory:", {"lockkit.toml": "no TOML"}, {"LOCKKIT_URL": "memory:"}),
    "template of another tool": Case("file:", {"pyproject.toml": "this is no TOML"}),
    "lockkit.toml wins": Case("memory://dev", DEV | {"pyproject.toml": PY_DEV}, profile="dev"),
    "nearer one wins": Case("memory://py", DEV | {"below/pyproject.toml": PY_DEV}, profile="dev"),
    **{
        f"not ours: {text}": Case("memory://dev", DEV | {"below/pyproject.toml": text}, profile="dev")
        for text in ("", "[tool.other]\nx = 1", "[project]\ndependencies = ['lockkit']", "tool = 1")
    },
    "LOCKKIT_CONFIG": Case("memory://usual", DEV | {"one.conf": USUAL}, {"LOCKKIT_CONFIG": "../../one.conf"}),
    "LOCKKIT_CONFIG with pyproject.toml": Case(
        "memory://py", {"lockkit.toml": "no TOML", "a/pyproject.toml": PY_DEV},
        {"LOCKKIT_CONFIG": "../../a/pyproject.toml"}, profile="dev",
    ),
    # Editors and shells on Windows write a byte order mark.
    "byte order mark": Case("memory://usual", {"lockkit.toml": f"\ufeff{USUAL}"}),
    "byte order mark in pyproject.toml": Case("memory://py", {"pyproject.toml": f"\ufeff{PY_DEV}"}, profile="dev"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_the_first_that_names_a_backend_decides(case: Case, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the module's docstring; the nearest file is the only one that is read."""
    settings = resolve(case, root, monkeypatch)

    assert f"{settings.url.text} [{settings.source}]".startswith(case.wanted)
    assert settings.embedded == (settings.url.text == "file:")


def profile(text: str, wanted: str, **environ: str) -> Case:
    """Make the case of a profile that is wrong."""
    return Case(rf"lockkit\.toml.*{wanted}", {"lockkit.toml": f"[profiles.a]\n{text}"}, environ, profile="a")


def file(text: str, wanted: str, name: str = "lockkit.toml") -> Case:
    """Make the case of a file that is wrong, where nothing chooses a profile."""
    return Case(rf"{name}.*{wanted}", {name: text})


PY = "pyproject.toml"
NO_NAME = "without the name of a variable and a }"
UNEXPANDED = ("redis://${HOST}/0", "redis://:${PASSWORD}@h", "${LOCK_URL}", "file:/${DIR", "redis://h/0?ttl=${T}")
REFUSED = [
    # Never passed over, for a lock of this machine alone, where the others use a server.
    Case(r"nothing chooses a profile, and the profile 'default' is not in .*toml. Its profiles are dev, prod: "
         r"choose one with LOCKKIT_ENV or profile=, or add \[profiles.default\]", DEV),
    Case("LOCKKIT_URL is set but empty", environ={"LOCKKIT_URL": ""}),
    Case("LOCKKIT_ENV is set but empty", environ={"LOCKKIT_ENV": ""}),
    Case("LOCKKIT_CONFIG is set but empty", DEV, {"LOCKKIT_CONFIG": ""}),
    Case("LOCKKIT_URL: the backend URL", environ={"LOCKKIT_URL": "localhost:hunter2"}),
    Case(r"missing.toml, which does not exist", DEV, {"LOCKKIT_CONFIG": "missing.toml"}, profile="dev"),
    Case(r"cannot read .*Is a directory", DEV, {"LOCKKIT_CONFIG": "../../below"}, profile="dev"),
    Case(r"which has no \[tool.lockkit\]", {PY: "[project]"}, {"LOCKKIT_CONFIG": f"../../{PY}"}),
    Case(r"profile 'dev', which is not in .*one\.conf", DEV | {"one.conf": USUAL},
         {"LOCKKIT_CONFIG": "../../one.conf"}, profile="dev"),
    Case(r"LOCKKIT_ENV asks for the profile 'prod', but neither .*/below/it nor .*\[profiles.prod\]",
         environ={"LOCKKIT_ENV": "prod"}),
    Case(r"which is not in .*Its profiles are default", DEV | {"below/lockkit.toml": USUAL}, profile="dev"),
    Case(r"'prdo'.*\(did you mean 'prod'\?\)\. Its profiles are dev, prod", DEV, profile="prdo"),
    *(Case("profile must be the name", DEV, profile=wrong) for wrong in ("", 1, b"dev", ["dev"])),
    # A URL in the place of a profile may have a password.
    *(Case("looks like a URL: give it as url", profile=wrong) for wrong in ("redis://:hunter2@h", "hunter2@h")),
    *(Case("looks like a URL: give it as LOCKKIT_URL", environ={"LOCKKIT_ENV": wrong})
      for wrong in ("redis://:hunter2@h", "hunter2@h")),
    # A URL is not a profile: its host would be looked for under the name ``${HOST}``.
    *(Case(r"the given url has a .* only a profile expands", url=wrong) for wrong in UNEXPANDED),
    *(Case(r"LOCKKIT_URL has a .* only a profile expands", environ={"LOCKKIT_URL": wrong}) for wrong in UNEXPANDED),
    file("", r"Its profiles are none: .*add \[profiles.default\]"),
    file("# nothing yet", "Its profiles are none"),
    file("[profiles]", "Its profiles are none"),
    file("url = 'redis://:hunter2@h'", r"unknown key 'url'.*\[profiles.default\]"),
    file(f"ttl = 5\n{USUAL}", r"unknown key 'ttl'.*\[profiles.default\]"),
    file("[profils.a]\nurl = 'memory:'", r"unknown key 'profils' \(did you mean 'profiles'\?\)"),
    file("[tool.lockkit]", r"Its profiles are none: .*add \[tool.lockkit.profiles.default\]", PY),
    file("[tool.lockkit]\nurl = 'memory:'", r"\[tool.lockkit.profiles.default\]", PY),
    file("[tool]\nlockkit = 1", r"tool.lockkit must be a table with \[tool.lockkit.profiles.NAME\]", PY),
    file(PY_DEV, "Its profiles are dev", PY),
    file("[tool.lockkit", "is not valid TOML", PY),
    file("# lockkit\n[tool\n", "is not valid TOML", PY),
    file("[profiles.a\nurl = 1", "line 1"),
    file("\n\nx = ", "line 3"),
    file("x = " + 5000 * "[", "is not valid TOML"),
    file("x = " + 5000 * "9", "is not valid TOML"),
    file("profiles = 1", "a profile must be a table"),
    file("[profiles]\na = 1", "a profile must be a table"),
    profile("ttl = 1", "url is missing or not a string"),
    profile("url = 1", "url is missing or not a string"),
    profile("url = ''", "the backend URL is empty"),
    profile("url = 'memory:'\nx = [1]", "x must be a string, a number, true or false, not list"),
    profile("url = 'memory:'\nx.y = 1", "x must be a string, a number, true or false, not dict"),
    profile("url = 'memory:'\nx = 2020-01-01", "not date"),
    profile("url = 'redis://:${PW}@h'", "url needs the environment variable PW, which is not set$", PX="hunter2"),
    profile("url = 'file:${DIRECTORY}'", "url needs the environment variable DIRECTORY, which is empty$", DIRECTORY=""),
    profile("url = 'redis://:${PW}@h'", r"the backend URL \(redis:…\) ", PW="hunter2/x"),
    # A default after ``:-`` may be a password.
    *(profile(f"url = 'redis://:hunter2{wrong}@h'", NO_NAME, A="x")
      for wrong in ("${", "${A", "${}", "${A B}", "${1}", "${A:-hunter2}", "x${é}")),
    profile("url = 'memory:'\nx = 'y${A'", NO_NAME, A="1"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.wanted[:40])
def test_settings_that_are_wrong_are_refused(case: Case, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what is wrong where, and shows no password."""
    with pytest.raises(ConfigurationError, match=case.wanted) as caught:
        resolve(case, root, monkeypatch)

    assert "hunter2" not in f"{caught.value!r}{caught.value.__cause__!r}"


@pytest.mark.parametrize("connect", [lockkit.connect, lockkit.aio.connect, doctor.examine])
@pytest.mark.parametrize(
    ("text", "part", "place"),
    [
        ("", "Its profiles are none", ""),
        ('[profiles.a]\nurl = "redsi://h"', "unknown URL scheme 'redsi'", " [profile 'a' in {path}]"),
        ('[profiles.a]\nurl = "memory://?tll=3"', "unknown option 'tll'", " [profile 'a' in {path}]"),
        ('[profiles.a]\nurl = "memory://"\ntll = 3', "unknown option 'tll'", " [profile 'a' in {path}]"),
        ('[profiles.a]\nurl = "memory://"\nttl = "${T}"', "option ttl='soon'", " [profile 'a' in {path}]"),
    ],
)
def test_everything_that_connects_says_what_is_wrong_and_where(  # noqa: PLR0917 - fixtures
    connect: Callable[[], object], text: str, part: str, place: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody finds it in the URL that the error shows: by both APIs, by the doctor, and for LOCKKIT_ENV."""
    path = write(root / "lockkit.toml", text)
    monkeypatch.setenv("T", "soon")
    monkeypatch.setenv("LOCKKIT_ENV", "a")

    with pytest.raises(ConfigurationError) as caught:
        connect()

    assert part in str(caught.value)
    assert str(caught.value).endswith(place.format(path=path))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301 - our own


@pytest.mark.usefixtures("root")
def test_wrong_variable_is_named_and_a_wrong_call_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller has the call in front of them."""
    monkeypatch.setenv("LOCKKIT_URL", "memory://?tll=3")

    with pytest.raises(ConfigurationError, match=r"unknown option 'tll'.* \[LOCKKIT_URL\]$"):
        lockkit.connect()
    with pytest.raises(ConfigurationError, match=r"unknown option 'tll'[^\[]*$"):
        lockkit.connect("memory://?tll=3")


# -- files of other users ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode", "part"),
    [
        ("lockkit.toml", 0o664, "lockkit.toml may be written to by its group"),
        ("lockkit.toml", 0o646, "lockkit.toml may be written to by anybody"),
        (".", 0o770, "may be written to by its group"),
        (".", 0o707, "may be written to by anybody"),
        ("..", 0o777, "may be written to by anybody"),
    ],
)
@pytest.mark.parametrize("profile", [None, "default"])
def test_file_that_another_user_could_have_written_is_refused(  # noqa: PLR0917 - fixtures
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: int, part: str, profile: str | None
) -> None:
    """It would choose the server that gets the passwords of a privileged job. The error says where and why."""
    path = write(root / "below" / "lockkit.toml", '[profiles.default]\nurl = "redis://:${PW}@evil"')
    culprit = Path(os.path.normpath(root / "below" / name))
    culprit.chmod(mode)
    monkeypatch.setenv("PW", "hunter2")

    with pytest.raises(ConfigurationError, match=part) as caught:
        profiles.resolve(None, profile, {})

    assert str(caught.value).startswith(f"{path} is refused, since another user could have written it: {culprit} may")
    assert str(caught.value).endswith(f"set LOCKKIT_CONFIG={path}")
    assert "hunter2" not in str(caught.value)


def _own_as_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a file away; who may not do that plays another user that reads it."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


@pytest.mark.parametrize("name", ["lockkit.toml", "pyproject.toml"])
def test_file_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In a sticky directory, where nobody can replace a file of this user, but put one there first."""
    path = write(root / name, PY_DEV if name == "pyproject.toml" else PROFILES)
    root.chmod(0o1777)
    assert profiles.resolve(None, "dev", {}).url.scheme == "memory"
    _own_as_another_user(path, monkeypatch)

    with pytest.raises(ConfigurationError, match=rf"{name} belongs to another user \(uid \d+\)"):
        profiles.resolve(None, "dev", {})
    monkeypatch.setenv("LOCKKIT_CONFIG", str(path))
    assert profiles.resolve(None, "dev", {}).url.scheme == "memory"


def test_pyproject_of_another_user_without_a_table_of_ours_is_passed_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that runs as root in the project of its user: it decides nothing."""
    _own_as_another_user(write(root / "pyproject.toml", "[project]\ndependencies = ['lockkit']"), monkeypatch)

    assert profiles.resolve(None, None, {}).embedded


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_lockkit_config_vouches_for_owner_and_directories_only(
    root: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """Whoever sets the variable may mean a file of the deploying user, but not one that anybody changes."""
    path = write(root / "lockkit.toml")
    root.chmod(0o777)
    monkeypatch.setenv("LOCKKIT_CONFIG", str(path))
    assert profiles.resolve(None, "dev", {}).url.text == "memory://dev"

    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=r"may be written to by .*chmod g?o?-w"):
        profiles.resolve(None, "dev", {})


def test_link_leads_to_the_directories_of_its_target(root: Path) -> None:
    """Who may write there could have replaced the target."""
    target = write(root / "open" / "lockkit.toml")
    (root / "lockkit.toml").symlink_to(target)
    assert profiles.resolve(None, "dev", {}).url.text == "memory://dev"

    target.parent.chmod(0o777)
    with pytest.raises(ConfigurationError, match="/open may be written to by anybody"):
        profiles.resolve(None, "dev", {})


def test_what_is_no_file_or_no_text_is_not_passed_over(root: Path) -> None:
    """Nobody may ever write to a FIFO: it must block nobody."""
    path = root / "lockkit.toml"
    for make, part in (
        (lambda: os.mkfifo(path), "not a regular file"),
        (lambda: path.write_bytes(b"\xff\xfe"), "cannot read .*lockkit.toml"),
        (path.mkdir, "cannot read .*lockkit.toml.*: change the directory, or set LOCKKIT_URL or LOCKKIT_CONFIG"),
    ):
        path.unlink(missing_ok=True)
        make()
        with pytest.raises(ConfigurationError, match=part):
            profiles.resolve(None, None, {})


def test_working_directory_that_is_gone_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment may have replaced it under a running program."""
    (root / "gone").mkdir()
    monkeypatch.chdir(root / "gone")
    (root / "gone").rmdir()

    with pytest.raises(ConfigurationError, match="the working directory"):
        profiles.resolve(None, "a", {})


# -- options and references ----------------------------------------------------------------------------------------


def test_given_options_win_over_the_profiles(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None counts as not given; the types of TOML are kept; `url` is no option; and no password is shown."""
    write(root / "lockkit.toml")
    monkeypatch.setenv("PW", "hunter2")

    settings = profiles.resolve(None, "prod", {"ttl": 5, "prefix": None, "mode": None, "password": "hunter2"})

    assert settings.options == {"ttl": 5, "prefix": "p:", "durable": True, "password": "hunter2"}
    assert dict(settings.url.query) == {"ttl": "7"}
    assert settings.url.password == "hunter2"  # noqa: S105
    assert "hunter2" not in repr(settings)
    assert profiles.resolve("memory://", None, {"ttl": 5, "prefix": None}).options == {"ttl": 5}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        *(("${A}", "1"), ("x${A}y${B_2}z", "x1y2z"), ("$A", "$A"), ("$$A $", "$$A $")),
        *(("$${A}", "${A}"), ("$$${A}", "$${A}"), ("$${${A}}", "${1}"), ("${N}", "${A}"), ("<${S}>", r"<\1${A}>")),
    ],
)
def test_references_are_replaced_once(text: str, expanded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a variable holds is not looked through again; only ``$${`` is an escape."""
    for name, value in {"A": "1", "B_2": "2", "N": "${A}", "S": r"\1${A}"}.items():
        monkeypatch.setenv(name, value)

    assert profiles._expand("key", text, "profile") == expanded


@given(st.text(st.sampled_from("${}A\\ ")))
def test_every_text_can_be_written(text: str) -> None:
    """Doubling the dollar of each ``${`` is enough."""
    assert profiles._expand("key", text.replace("${", "$${"), "profile") == text


def test_profile_beside_a_url_is_not_ignored_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """It may require a scope."""
    assert profiles.resolve("memory://", "prod", {}).url.text == "memory://"

    assert caplog.messages == ["the given url decides, so the profile 'prod' and its options are not used"]


def test_literal_may_look_like_a_variable(root: Path) -> None:
    """Written so on purpose: with ``$${`` in a profile, percent-encoded in a URL."""
    write(root / "lockkit.toml", "[profiles.a]\nurl = 'redis://:$${x}@h'")

    for settings in (profiles.resolve(None, "a", {}), profiles.resolve("redis://:%24%7Bx}@h", None, {})):
        assert settings.url.hosts[0].password == "${x}"  # noqa: S105 - it is not a secret


# -- misspelled variables ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("LOCKKIT_ULR", "URL"), ("LOCKKIT_URI", "URL"), ("LOCKKIT_BACKEND", "URL"), ("LOCKIT_URL", "URL")),
        *(("LOCKKITURL", "URL"), ("LOCK_KIT_URL", "URL"), ("lockkit_url", "URL"), ("Lockkit_Config", "CONFIG")),
        *(("LOCKKIT_PROFILE", "ENV"), ("LOCKKIT_ENVIRONMENT", "ENV"), ("LOCKIT_ENV", "ENV")),
    ],
)
def test_misspelled_variable_is_warned_of_where_it_would_have_decided(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    """A crontab with a typo would exclude no other machine, and nobody would notice."""
    monkeypatch.setenv(name, "redis://:hunter2@h")
    with monkeypatch.context() as patch:
        patch.setenv("LOCKKIT_URL", "memory:")
        profiles.resolve(None, None, {})
    assert caplog.messages == []

    assert profiles.resolve(None, None, {}).url.text == "file:"

    (said,) = caplog.messages
    assert said.startswith(f"{name} is set, which lockkit does not read: did you mean LOCKKIT_{meant}?")
    assert "hunter2" not in said


@pytest.mark.usefixtures("root")
def test_other_variables_are_nobodys_business(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `lockkit run` for its command, of Kubernetes for a service, of tests and of the application."""
    for name in (
        *("NAME", "TOKEN", "OWNER", "DEADLINE", "ONCE", "STATE_DIR", "DEBUG_ORDER"),
        *("PORT", "SERVICE_HOST", "SERVICE_PORT", "PORT_6379_TCP_ADDR", "TEST_REDIS_URL", "REDIS_URL", "TTL", "PREFIX"),
    ):
        monkeypatch.setenv(f"LOCKKIT_{name}", "/x")
    monkeypatch.setenv("LOCK_URL", "x")

    profiles.resolve(None, None, {})

    assert caplog.messages == []


# -- the default directory -----------------------------------------------------------------------------------------

HOME = pwd.getpwuid(os.getuid()).pw_dir


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("platform", "wanted"),
    [("linux", ".local/state/lockkit"), ("darwin", "Library/Application Support/lockkit")],
)
@pytest.mark.parametrize(
    "environ", [{}, {"HOME": "/home/u"}, {"HOME": ""}, {"HOME": "relative"}, {"XDG_STATE_HOME": "/state"}]
)
def test_default_directory_is_the_same_in_cron_and_in_a_shell(
    monkeypatch: pytest.MonkeyPatch, platform: str, wanted: str, environ: dict[str, str]
) -> None:
    """By the user database: a user's programs exclude each other whatever HOME and XDG_STATE_HOME are."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.delenv("HOME", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    assert profiles.default_directory() == Path(HOME) / wanted


@pytest.mark.usefixtures("root")
def test_default_directory_of_a_user_without_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers have such ids, and set HOME or not; LOCKKIT_STATE_DIR comes first, and is absolute."""
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    monkeypatch.delenv("HOME", raising=False)
    with pytest.raises(ConfigurationError, match="set LOCKKIT_STATE_DIR"):
        profiles.default_directory()

    monkeypatch.setenv("HOME", "/home/u")
    assert profiles.default_directory() == Path("/home/u/.local/state/lockkit")
    monkeypatch.setenv("LOCKKIT_STATE_DIR", "/locks")
    assert profiles.default_directory() == Path("/locks")
    for relative in ("", "relative", "~/locks"):
        monkeypatch.setenv("LOCKKIT_STATE_DIR", relative)
        with pytest.raises(ConfigurationError, match="LOCKKIT_STATE_DIR"):
            profiles.default_directory()
