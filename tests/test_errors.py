"""The exception tree: bases, attributes, pickling."""

from __future__ import annotations

import pickle

import pytest

import lockkit
from lockkit import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", CLASSES)
def test_survives_pickling(kind: type[errors.LockError]) -> None:
    """Message and attributes arrive in the other process."""
    error = kind("could not do it", name="seat:12A", backend="redis://:***@h/0")

    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes

    assert type(copy) is kind
    assert str(copy) == "could not do it"
    assert (copy.name, copy.backend) == ("seat:12A", "redis://:***@h/0")


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigurationError, ValueError),
        (errors.BackendUnavailable, ConnectionError),
        (errors.NoQuorum, errors.BackendUnavailable),
        (errors.LockTimeout, TimeoutError),
        (errors.Unsupported, NotImplementedError),
    ],
)
def test_has_the_builtin_that_users_already_catch(kind: type[Exception], builtin: type[Exception]) -> None:
    """The second base."""
    assert issubclass(kind, builtin)
    assert issubclass(kind, lockkit.LockError)


@pytest.mark.parametrize("kind", CLASSES)
def test_needs_no_argument_and_shows_no_errno(kind: type[errors.LockError]) -> None:
    """The ``OSError`` bases would show ``[Errno …]`` or fail."""
    assert str(kind()) == ""
    assert str(kind("text")) == "text"
    assert (kind().name, kind().backend) == (None, None)
