from __future__ import annotations

import os
import pickle
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with settings, and one below it."""
    (tmp_path / "lockkit.toml").write_text(PROFILES)
    (tmp_path / "below" / "it").mkdir(parents=True)
    return tmp_path


def resolve(
    url: str | None = None,
    profile: str | None = None,
    *,
    directory: Path,
    environ: Mapping[str, str] | None = None,
    **options: object,
) -> profiles.Settings:
    """Resolve without the settings of the machine that runs the test."""
    return profiles.resolve(url, profile, options, environ=environ or {}, directory=directory)


def write(directory: Path, text: str, *, name: str = "lockkit.toml") -> Path:
    """Write a file of settings."""
    path = directory / name
    path.write_text(text)
    return path


# -- the order -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "environ", "wanted", "source"),
    [
        (("memory://a", "dev"), {"LOCKKIT_URL": "memory://b", "LOCKKIT_ENV": "prod"}, "memory://a", "the given url"),
        ((None, "dev"), {"LOCKKIT_URL": "memory://b", "LOCKKIT_ENV": "prod"}, "memory://dev", "profile 'dev' in "),
        ((None, None), {"LOCKKIT_URL": "memory://b", "LOCKKIT_ENV": "dev"}, "memory://b", "LOCKKIT_URL"),
        ((None, None), {"LOCKKIT_ENV": "dev"}, "memory://dev", "profile 'dev' in "),
        ((None, None), {}, "memory://usual", "profile 'default' in "),
    ],
)
def test_the_first_that_says_something_decides(
    project: Path, arguments: tuple[str | None, str | None], environ: dict[str, str], wanted: str, source: str
) -> None:
    """The order is url, profile, LOCKKIT_URL, LOCKKIT_ENV, the profile default."""
    write(project, f'{PROFILES}\n[profiles.default]\nurl = "memory://usual"')

    settings = resolve(*arguments, directory=project, environ=environ)

    assert settings.url.text == wanted
    assert settings.source.startswith(source)


def test_without_configuration_locks_are_files_of_this_user(tmp_path: Path) -> None:
    """Also where another tool has a pyproject.toml, and where a dependency is named there."""
    write(tmp_path, "[project]\ndependencies = ['lockkit']\n[tool.other]\nx = 1", name="pyproject.toml")

    settings = resolve(directory=tmp_path)

    assert (settings.url.text, settings.embedded) == ("file:", True)


def test_files_are_not_read_where_a_url_is_given(tmp_path: Path) -> None:
    """A broken file of another project does not stop a program that does not use it."""
    write(tmp_path, "this is no TOML")

    assert resolve("memory://", directory=tmp_path).url.text == "memory://"
    assert resolve(directory=tmp_path, environ={"LOCKKIT_URL": "memory:"}).url.text == "memory:"


@pytest.mark.parametrize("text", ["this is no TOML", "[tool.lockkit", "# lockkit\n[tool\n"])
def test_pyproject_that_is_no_toml_matters_only_if_it_may_be_meant(tmp_path: Path, text: str) -> None:
    """A template of another tool is passed over."""
    write(tmp_path, text, name="pyproject.toml")

    if "lockkit" not in text:
        assert resolve(directory=tmp_path).embedded
        return
    with pytest.raises(ConfigurationError, match=r"pyproject\.toml is not valid TOML"):
        resolve(directory=tmp_path)


def test_configuration_without_the_profile_default_is_never_passed_over(project: Path) -> None:
    """Locks of this machine, where the others use the server of the file, would exclude no other machine."""
    with pytest.raises(ConfigurationError) as caught:
        resolve(directory=project / "below")

    assert str(caught.value) == (
        f"nothing chooses a profile, and {project / 'lockkit.toml'} has no profile 'default'. Its profiles are dev, "
        "prod: choose one with LOCKKIT_ENV or profile=, or add [profiles.default]"
    )


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("lockkit.toml", "", r"lockkit.toml has no profiles: add \[profiles.default\]"),
        ("lockkit.toml", "# nothing yet", "has no profiles"),
        ("lockkit.toml", "[profiles]", "has no profiles"),
        ("lockkit.toml", "url = 'redis://:hunter2@h'", r"unknown key 'url'.*\[profiles.default\]"),
        ("lockkit.toml", "ttl = 5\n[profiles.default]\nurl = 'memory:'", r"unknown key 'ttl'.*\[profiles.default\]"),
        ("pyproject.toml", "[tool.lockkit]", r"has no profiles: add \[tool.lockkit.profiles.default\]"),
        ("pyproject.toml", "[tool.lockkit]\nurl = 'memory:'", r"\[tool.lockkit.profiles.default\]"),
        ("pyproject.toml", "[tool]\nlockkit = 1", "tool.lockkit must be a table"),
        ("pyproject.toml", "[tool.lockkit.profiles.dev]\nurl = 'memory:'", "Its profiles are dev"),
    ],
)
def test_configuration_that_names_no_backend_by_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, part: str
) -> None:
    """By everything that connects, at the call."""
    write(tmp_path, text, name=name)
    monkeypatch.chdir(tmp_path)
    for variable in ("LOCKKIT_URL", "LOCKKIT_ENV"):
        monkeypatch.delenv(variable, raising=False)

    for connect in (lockkit.connect, lockkit.aio.connect, doctor.examine):
        with pytest.raises(ConfigurationError, match=part) as caught:
            connect()
        assert "hunter2" not in str(caught.value)


# -- LOCKKIT_CONFIG ------------------------------------------------------------------------------------------------


def test_lockkit_config_names_the_only_file(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of any name; a pyproject.toml by its name."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    one = write(elsewhere, '[profiles.default]\nurl = "memory://one"', name="locks.conf")
    two = write(elsewhere, '[tool.lockkit.profiles.default]\nurl = "memory://two"', name="pyproject.toml")

    assert resolve(directory=project, environ={"LOCKKIT_CONFIG": str(one)}).url.text == "memory://one"
    assert resolve(directory=project, environ={"LOCKKIT_CONFIG": str(two)}).url.text == "memory://two"
    with pytest.raises(ConfigurationError, match=r"asks for the profile 'dev', which .*locks\.conf does not have"):
        resolve(profile="dev", directory=project, environ={"LOCKKIT_CONFIG": str(one)})


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("", "LOCKKIT_CONFIG is set but empty"),
        ("missing.toml", "missing.toml, which does not exist"),
        ("below", "not a regular file"),
        ("pyproject.toml", r"pyproject.toml, which has no \[tool.lockkit\]"),
    ],
)
def test_lockkit_config_that_names_no_configuration_never_falls_back(project: Path, name: str, part: str) -> None:
    """Neither to a file that a search would find nor to files of this machine."""
    write(project, "[project]", name="pyproject.toml")

    for profile in (None, "dev"):
        with pytest.raises(ConfigurationError, match=part):
            resolve(profile=profile, directory=project, environ={"LOCKKIT_CONFIG": name and str(project / name)})


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
def test_file_that_another_user_could_have_written_is_refused(
    tmp_path: Path, name: str, mode: int, part: str, profile: str | None
) -> None:
    """It would choose the server that gets the passwords of a privileged job. The error says where and why."""
    directory = tmp_path / "shared" / "project"
    (directory / "below").mkdir(parents=True)
    path = write(directory, '[profiles.default]\nurl = "redis://:${PW}@evil"')
    culprit = Path(os.path.normpath(directory / name))
    culprit.chmod(mode)

    with pytest.raises(ConfigurationError, match=part) as caught:
        resolve(profile=profile, directory=directory / "below", environ={"PW": "hunter2"})

    assert str(caught.value).startswith(f"{path} is refused, since another user could have written it: {culprit} may")
    assert str(caught.value).endswith(f"set LOCKKIT_CONFIG={path}")
    assert "hunter2" not in str(caught.value)


def test_sticky_directory_that_anybody_may_write_to_is_as_good_as_tmp(project: Path) -> None:
    """There nobody can replace a file of this user."""
    project.chmod(0o1777)

    assert resolve(profile="dev", directory=project).url.text == "memory://dev"


@pytest.mark.parametrize("name", ["lockkit.toml", "pyproject.toml"])
def test_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In a sticky directory too, where another user may have put it first."""
    prefix = "tool.lockkit." if name == "pyproject.toml" else ""
    path = write(tmp_path, f'[{prefix}profiles.default]\nurl = "memory://"', name=name)
    tmp_path.chmod(0o1777)
    _own_as_another_user(path, monkeypatch)

    with pytest.raises(ConfigurationError, match=rf"{name} belongs to another user \(uid \d+\)"):
        resolve(directory=tmp_path)
    assert resolve(directory=tmp_path, environ={"LOCKKIT_CONFIG": str(path)}).url.text == "memory://"


def _own_as_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a file away; who may not do that plays another user that reads it."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


def test_pyproject_of_another_user_without_a_table_of_ours_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that runs as root in the project of its user: it decides nothing."""
    path = write(tmp_path, "[project]\ndependencies = ['lockkit']", name="pyproject.toml")
    _own_as_another_user(path, monkeypatch)

    assert resolve(directory=tmp_path).embedded


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_lockkit_config_vouches_for_owner_and_directories_only(project: Path, mode: int) -> None:
    """Whoever sets the variable may mean a file of the deploying user, but not one that anybody changes."""
    path = project / "lockkit.toml"
    project.chmod(0o777)
    environ = {"LOCKKIT_CONFIG": str(path)}
    assert resolve(profile="dev", directory=project, environ=environ).url.text == "memory://dev"

    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=r"may be written to by .*chmod g?o?-w"):
        resolve(profile="dev", directory=project, environ=environ)


def test_link_leads_to_the_directories_of_its_target(tmp_path: Path) -> None:
    """Who may write there could have replaced the target."""
    (tmp_path / "open").mkdir()
    write(tmp_path / "open", PROFILES)
    (tmp_path / "lockkit.toml").symlink_to(tmp_path / "open" / "lockkit.toml")
    assert resolve(profile="dev", directory=tmp_path).url.text == "memory://dev"

    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigurationError, match="/open may be written to by anybody"):
        resolve(profile="dev", directory=tmp_path)


def test_fifo_blocks_nobody(tmp_path: Path) -> None:
    """Nobody may ever write to it."""
    os.mkfifo(tmp_path / "lockkit.toml")

    with pytest.raises(ConfigurationError, match="not a regular file"):
        resolve(directory=tmp_path)


# -- the process ---------------------------------------------------------------------------------------------------


def test_process_environment_and_working_directory_are_the_default(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `connect` uses it."""
    monkeypatch.chdir(project / "below")
    monkeypatch.setenv("LOCKKIT_ENV", "dev")

    assert profiles.resolve(None, None, {}).source == f"profile 'dev' in {project / 'lockkit.toml'}"


# -- options -------------------------------------------------------------------------------------------------------


def test_given_options_win_over_the_profiles(project: Path) -> None:
    """None counts as not given; the types of TOML are kept; `url` is no option."""
    settings = resolve(profile="prod", directory=project, environ={"PW": "x"}, ttl=5, prefix=None, mode=None)

    assert settings.options == {"ttl": 5, "prefix": "p:", "durable": True}
    assert dict(settings.url.query) == {"ttl": "7"}


def test_options_without_profile_are_those_given(tmp_path: Path) -> None:
    """Without the Nones."""
    assert resolve("memory://", directory=tmp_path, ttl=5, prefix=None).options == {"ttl": 5}


def test_settings_show_no_password(project: Path) -> None:
    """Neither of the URL nor of the options."""
    settings = resolve(profile="prod", directory=project, environ={"PW": "hunter2"}, password="hunter2")  # noqa: S106

    assert settings.url.password == "hunter2"  # noqa: S105
    assert "hunter2" not in repr(settings)


# -- the search ----------------------------------------------------------------------------------------------------


def test_search_goes_upwards(project: Path) -> None:
    """From the working directory to the root."""
    assert resolve(profile="dev", directory=project / "below" / "it").url.text == "memory://dev"


def test_nearest_file_wins_and_is_the_only_one_read(project: Path) -> None:
    """Profiles of a directory above are not mixed in."""
    write(project / "below", '[profiles.other]\nurl = "memory://other"')

    with pytest.raises(ConfigurationError, match=r"does not have. Its profiles are other"):
        resolve(profile="dev", directory=project / "below" / "it")


def test_lockkit_toml_wins_in_one_directory(project: Path) -> None:
    """Over [tool.lockkit] of pyproject.toml."""
    write(project, '[tool.lockkit.profiles.dev]\nurl = "memory://py"', name="pyproject.toml")

    assert resolve(profile="dev", directory=project).url.text == "memory://dev"


def test_pyproject_with_a_table_of_ours_is_used(project: Path) -> None:
    """And nearer than a lockkit.toml above it."""
    write(project / "below", '[tool.lockkit.profiles.dev]\nurl = "memory://py"\nttl = 3', name="pyproject.toml")

    settings = resolve(profile="dev", directory=project / "below" / "it")

    assert settings.url.text == "memory://py"
    assert settings.options == {"ttl": 3}
    assert settings.source == f"profile 'dev' in {project / 'below' / 'pyproject.toml'}"


@pytest.mark.parametrize("text", ["", "[tool.other]\nx = 1", "[project]\nname = 'x'", "tool = 1"])
def test_pyproject_without_a_table_of_ours_does_not_end_the_search(project: Path, text: str) -> None:
    """A package inside a monorepo uses the settings above it."""
    write(project / "below", text, name="pyproject.toml")

    assert resolve(profile="dev", directory=project / "below").url.text == "memory://dev"


# -- references ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("${A}", "1"),
        ("x${A}y${B_2}z", "x1y2z"),
        ("${E}", ""),
        ("$A", "$A"),
        ("$$A $", "$$A $"),
        ("$${A}", "${A}"),
        ("$$${A}", "$${A}"),
        ("$${${A}}", "${1}"),
        ("${N}", "${A}"),
    ],
)
def test_references_are_replaced_once(text: str, expanded: str) -> None:
    """What a variable holds is not looked through again; only ``$${`` is an escape."""
    environ = {"A": "1", "B_2": "2", "E": "", "N": "${A}"}

    assert profiles._expand("key", text, "profile", environ) == expanded


@given(st.text())
def test_what_a_variable_holds_is_put_in_as_it_is(value: str) -> None:
    """Also with backslashes and references in it."""
    assert profiles._expand("key", "<${A}>", "profile", {"A": value}) == f"<{value}>"


@given(st.text(st.sampled_from("${}A\\ ")))
def test_every_text_can_be_written(text: str) -> None:
    """Doubling the dollar of each ``${`` is enough."""
    assert profiles._expand("key", text.replace("${", "$${"), "profile", {}) == text


def test_missing_variable_is_named(project: Path) -> None:
    """With the profile, its file and the key."""
    with pytest.raises(ConfigurationError) as caught:
        resolve(profile="prod", directory=project, environ={"PX": "hunter2"})

    message = f"profile 'prod' in {project / 'lockkit.toml'}: url needs the environment variable PW, which is not set"
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["${", "${A", "${}", "${A B}", "${1}", "${A:-hunter2}", "x${é}"])
def test_malformed_reference_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    """A default after ``:-`` may be a password."""
    path = write(tmp_path, f'[profiles.a]\nurl = "redis://:hunter2{text}@h"')

    with pytest.raises(ConfigurationError, match="without the name of a variable") as caught:
        resolve(profile="a", directory=tmp_path, environ={"A": "x"})

    assert str(path) in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_reference_that_is_not_closed_is_refused() -> None:
    """Also at the end of a text, and though the variable is set."""
    with pytest.raises(ConfigurationError, match="without the name of a variable and a }"):
        profiles._expand("key", "x${A", "profile", {"A": "1"})


def test_malformed_url_from_a_variable_is_not_shown(tmp_path: Path) -> None:
    """The message says which profile of which file, and nothing of the value."""
    path = write(tmp_path, '[profiles.a]\nurl = "redis://:${PW}@h"')

    with pytest.raises(ConfigurationError) as caught:
        resolve(profile="a", directory=tmp_path, environ={"PW": "hun/ter2"})

    assert str(caught.value).startswith(f"profile 'a' in {path}: the backend URL (redis:…) ")
    assert "hun" not in f"{caught.value!r}{caught.value.__cause__!r}"


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({"LOCKKIT_URL": ""}, "LOCKKIT_URL is set but empty"),
        ({"LOCKKIT_ENV": ""}, "LOCKKIT_ENV is set but empty"),
        ({"LOCKKIT_URL": "localhost:hunter2"}, "LOCKKIT_URL: the backend URL"),
    ],
)
def test_environment_that_is_wrong_never_falls_back(tmp_path: Path, environ: dict[str, str], part: str) -> None:
    """A lock of this machine alone, where the others use a server, would exclude no other machine."""
    with pytest.raises(ConfigurationError, match=part) as caught:
        resolve(directory=tmp_path, environ=environ)

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LOCKKIT_ULR", "LOCKKIT_URL"),
        ("LOCKKIT_URI", "LOCKKIT_URL"),
        ("LOCKKIT_PROFILE", "LOCKKIT_ENV"),
        ("LOCKKIT_ENVIRONMENT", "LOCKKIT_ENV"),
    ],
)
def test_misspelled_variable_is_warned_of_where_it_would_have_decided(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, meant: str
) -> None:
    """A crontab with a typo would exclude no other machine, and nobody would notice."""
    resolve(directory=tmp_path, environ={name: "redis://:hunter2@h", "LOCKKIT_URL": "memory:"})
    assert caplog.messages == []

    assert resolve(directory=tmp_path, environ={name: "redis://:hunter2@h"}).url.text == "file:"

    (said,) = caplog.messages
    assert said.startswith(f"{name} is set, which lockkit does not read: did you mean {meant}?")
    assert "hunter2" not in said


def test_other_variables_are_nobodys_business(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of `lockkit run` for its command, of Kubernetes for a service, of tests and of the application."""
    others = (
        *("NAME", "TOKEN", "OWNER", "DEADLINE", "ONCE", "STATE_DIR", "DEBUG_ORDER"),
        *("PORT", "SERVICE_HOST", "SERVICE_PORT", "PORT_6379_TCP_ADDR", "TEST_REDIS_URL", "REDIS_URL", "TTL", "PREFIX"),
    )

    resolve(directory=tmp_path, environ={f"LOCKKIT_{name}": "/x" for name in others} | {"LOCK_URL": "x"})

    assert caplog.messages == []


def test_lockkit_env_without_any_file_is_an_error(tmp_path: Path) -> None:
    """It says where was looked, and what to write."""
    with pytest.raises(ConfigurationError) as caught:
        resolve(directory=tmp_path, environ={"LOCKKIT_ENV": "prod"})

    assert "LOCKKIT_ENV asks for the profile 'prod'" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "[profiles.prod]" in str(caught.value)


def test_unknown_profile_suggests_the_nearest(project: Path) -> None:
    """And lists those that there are."""
    with pytest.raises(ConfigurationError, match=r"'prdo'.*\(did you mean 'prod'\?\)\. Its profiles are dev, prod"):
        resolve(profile="prdo", directory=project)


@pytest.mark.parametrize("profile", ["", 1, b"dev", ["dev"]])
def test_profile_must_be_a_name(project: Path, profile: Any) -> None:  # noqa: ANN401 - wrong on purpose
    """Whatever else was given."""
    with pytest.raises(ConfigurationError, match="profile must be the name"):
        resolve(profile=profile, directory=project)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[profiles.a\nurl = 1", "line 1"),
        ("\n\nx = ", "line 3"),
        ("x = " + 5000 * "[", "is not valid TOML"),
        ("x = " + 5000 * "9", "is not valid TOML"),
        ("profiles = 1", "a profile must be a table"),
        ("[profiles]\na = 1", "a profile must be a table"),
        ("[profils.a]\nurl = 'memory:'", r"unknown key 'profils' \(did you mean 'profiles'\?\)"),
        ("url = 'memory:'", "unknown key 'url'"),
        ("[profiles.a]\nttl = 1", "url is missing or not a string"),
        ("[profiles.a]\nurl = 1", "url is missing or not a string"),
        ("[profiles.a]\nurl = ''", "the backend URL is empty"),
        ("[profiles.a]\nurl = 'memory:'\nx = [1]", "x must be a string, a number, true or false, not list"),
        ("[profiles.a]\nurl = 'memory:'\nx.y = 1", "x must be a string, a number, true or false, not dict"),
        ("[profiles.a]\nurl = 'memory:'\nx = 2020-01-01", "not date"),
    ],
)
def test_file_of_settings_that_is_wrong(tmp_path: Path, text: str, part: str) -> None:
    """The message names the file, and where TOML is wrong, the line."""
    path = write(tmp_path, text)

    with pytest.raises(ConfigurationError, match=part) as caught:
        resolve(profile="a", directory=tmp_path)

    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[tool]\nlockkit = 1", r"tool.lockkit must be a table with \[tool.lockkit.profiles.NAME\]"),
        ("[tool.lockkit]\nurl = 'memory:'", r"\[tool.lockkit.profiles.NAME\]"),
    ],
)
def test_pyproject_that_is_wrong(tmp_path: Path, text: str, part: str) -> None:
    """The table that the message proposes is below tool.lockkit."""
    write(tmp_path, text, name="pyproject.toml")

    with pytest.raises(ConfigurationError, match=part):
        resolve(profile="a", directory=tmp_path)


@pytest.mark.parametrize("name", ["lockkit.toml", "pyproject.toml"])
def test_byte_order_mark_is_passed_over(tmp_path: Path, name: str) -> None:
    """Editors and shells on Windows write one."""
    prefix = "tool.lockkit." if name == "pyproject.toml" else ""
    (tmp_path / name).write_bytes(f"\ufeff[{prefix}profiles.a]\r\nurl = 'memory://'\r\n".encode())

    assert resolve(profile="a", directory=tmp_path).url.scheme == "memory"


def test_working_directory_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment may have replaced it under a running program."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    with pytest.raises(ConfigurationError, match="the working directory"):
        profiles.resolve(None, "a", {}, environ={})


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    """A directory of that name, or bytes that are no UTF-8, are not passed over."""
    (tmp_path / "one" / "lockkit.toml").mkdir(parents=True)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "lockkit.toml").write_bytes(b"\xff\xfe")

    for name in ("one", "two"):
        with pytest.raises(ConfigurationError, match=f"cannot read .*{name}/lockkit.toml"):
            resolve(profile="a", directory=tmp_path / name)


@pytest.mark.parametrize(
    ("profile", "part"),
    [
        ('url = "redsi://h"', "unknown URL scheme 'redsi'"),
        ('url = "memory://?tll=3"', "unknown option 'tll'"),
        ('url = "memory://"\ntll = 3', "unknown option 'tll'"),
        ('url = "memory://"\nttl = "${T}"', "option ttl='soon'"),
    ],
)
def test_what_is_wrong_in_a_profile_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str, part: str
) -> None:
    """Nobody finds it in the URL that the error shows: by both APIs, by the doctor, and for LOCKKIT_ENV."""
    path = write(tmp_path, f"[profiles.a]\n{profile}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("T", "soon")
    monkeypatch.setenv("LOCKKIT_ENV", "a")
    monkeypatch.delenv("LOCKKIT_URL", raising=False)

    for open_it in (lockkit.connect, lockkit.aio.connect, doctor.examine):
        with pytest.raises(ConfigurationError) as caught:
            open_it()

        assert part in str(caught.value)
        assert str(caught.value).endswith(f" [profile 'a' in {path}]")
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301 - our own


def test_wrong_variable_is_named_and_a_wrong_call_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller has the call in front of them."""
    monkeypatch.setenv("LOCKKIT_URL", "memory://?tll=3")

    with pytest.raises(ConfigurationError, match=r"unknown option 'tll'.* \[LOCKKIT_URL\]$"):
        lockkit.connect()
    with pytest.raises(ConfigurationError, match=r"unknown option 'tll'[^\[]*$"):
        lockkit.connect("memory://?tll=3")


# -- the default directory -----------------------------------------------------------------------------------------


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

    assert profiles.default_directory(environ) == Path(pwd.getpwuid(os.getuid()).pw_dir) / wanted


def test_default_directory_of_a_user_without_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers have such ids, and set HOME; LOCKKIT_STATE_DIR comes first for everybody."""
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)

    assert profiles.default_directory({"HOME": "/home/u"}) == Path("/home/u/.local/state/lockkit")
    assert profiles.default_directory({"HOME": "/home/u", "LOCKKIT_STATE_DIR": "/locks"}) == Path("/locks")


def test_no_home_at_all_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id without an entry in the user database, as containers have it."""
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)

    with pytest.raises(ConfigurationError, match="set LOCKKIT_STATE_DIR"):
        profiles.default_directory({})


@pytest.mark.parametrize("value", ["", "relative", "~/locks"])
def test_state_directory_must_be_absolute(value: str) -> None:
    """A relative one would be another set of locks for each working directory."""
    with pytest.raises(ConfigurationError, match="LOCKKIT_STATE_DIR"):
        profiles.default_directory({"LOCKKIT_STATE_DIR": value, "HOME": "/home/u"})


@pytest.mark.parametrize(
    "url", ["redis://${HOST}/0", "redis://:${PASSWORD}@h", "${LOCK_URL}", "file:/${DIR", "redis://h/0?ttl=${T}"]
)
def test_variable_that_nobody_expanded_is_refused(tmp_path: Path, url: str) -> None:
    """A URL is not a profile: its host would be looked for under the name ``${HOST}``."""
    environ = {"HOST": "h", "PASSWORD": "p", "LOCK_URL": "memory:", "T": "5"}
    with pytest.raises(ConfigurationError, match=r"the given url has a .* only a profile expands"):
        resolve(url, directory=tmp_path, environ=environ)
    with pytest.raises(ConfigurationError, match=r"LOCKKIT_URL has a .* only a profile expands"):
        resolve(directory=tmp_path, environ={**environ, "LOCKKIT_URL": url})


def test_literal_may_look_like_a_variable(tmp_path: Path) -> None:
    """Written so on purpose: with ``$${`` in a profile, percent-encoded in a URL."""
    write(tmp_path, "[profiles.a]\nurl = 'redis://:$${x}@h'")

    for settings in (resolve(None, "a", directory=tmp_path), resolve("redis://:%24%7Bx}@h", directory=tmp_path)):
        assert settings.url.hosts[0].password == "${x}"  # noqa: S105 - it is not a secret


def test_url_in_place_of_a_profile_is_not_shown(tmp_path: Path) -> None:
    """It may have a password."""
    for wrong in ("redis://:hunter2@h", "hunter2@h"):
        with pytest.raises(ConfigurationError, match="looks like a URL: give it as url") as given:
            resolve(None, wrong, directory=tmp_path)
        with pytest.raises(ConfigurationError, match="looks like a URL: give it as LOCKKIT_URL") as named:
            resolve(directory=tmp_path, environ={"LOCKKIT_ENV": wrong})
        assert "hunter2" not in f"{given.value!r}{named.value!r}"
