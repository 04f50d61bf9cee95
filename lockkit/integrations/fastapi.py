"""Locks, a background leader and idempotency keys for FastAPI. Needs ``pip install 'lockkit[fastapi]'``."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from enum import Enum
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

from fastapi import Depends, Request, params
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from starlette.requests import HTTPConnection

from lockkit.aio import Client, Lease
from lockkit.errors import ConfigurationError
from lockkit.integrations.idempotency import IdempotencyMiddleware
from lockkit.integrations.starlette import check_options, client_of, filled, hold, lead, lifespan, name_fields
from lockkit.units import Seconds

__all__ = ["Client", "IdempotencyMiddleware", "Lease", "client", "lead", "lifespan", "locked"]

_ELSEWHERE = (params.Header, params.Cookie, params.Body, params.Depends)
"""Markers of parameters that FastAPI does not take from the path or the query."""

_Declared = tuple[TypeAdapter[Any] | None, Callable[[], object] | None, str]
"""Type, factory of the default and alias of a parameter; None for each that is missing."""


def client(request: HTTPConnection) -> Client:
    """
    Return the client of `lifespan`, as a dependency: ``client: Annotated[Client, Depends(client)]``.

    Also for WebSockets.
    """
    return client_of(request.scope)


def locked(
    name: str | Callable[..., str],
    *,
    timeout: Seconds | timedelta | None = 0,
    retry_after: Seconds | timedelta = 1,
    cancel_on_lost: bool = True,
    **options: Any,
) -> Any:  # noqa: ANN401 - as `Depends`, so that it can be a default
    """
    Return a dependency that holds a lock until the endpoint has returned; its value is the lease.

    ``lease: Annotated[Lease, locked("seat:{seat}")]`` as a parameter, or ``dependencies=[locked("report")]``.

    lockkit releases the lock before the response is sent. So it can still turn the response into an error if the lease
    was lost; but the body of a streaming response, background tasks, and the end of a dependency that yields run
    without the lock. Such a dependency ends under the lock if it has ``scope="function"`` and comes after this one.

    Args:
        name: Of the lock. Fields such as ``{seat}`` are path or query parameters of the request, converted as the
            endpoint or one of its dependencies declares them: with ``seat: int``, ``/seats/7`` and ``/seats/07`` are
            one lock. Or a dependency that returns the name, for example from the body.
        timeout: Seconds to wait; 0 tries once, None waits as long as the client does.
        retry_after: Seconds that a refused client is asked to wait (the ``Retry-After`` header, in whole seconds).
        cancel_on_lost: Cancel an ``async def`` endpoint when its lease is lost. (A thread cannot be cancelled.)
        **options: As for `lockkit.aio.Client.lock`.

    Returns:
        What `fastapi.Depends` returns. Its value is the lease. The response is 409 if the lock is busy, 503 if the
        backend is unavailable, 422 if no lock can have the name, and 500 if the lease was lost before the endpoint
        returned.

    Raises:
        ConfigurationError: The name is no template and no dependency, or an option is wrong. At a request: the endpoint
            is that of a WebSocket, or a generator function, whose body FastAPI runs after the release.
        TypeError: There is no such option.
    """
    check_options(timeout, retry_after, {**options, "cancel_on_lost": cancel_on_lost})
    template = None if callable(name) else name
    naming = name if callable(name) else _naming(name)

    async def hold_lock(request: HTTPConnection, named: str = Depends(naming)) -> AsyncIterator[Lease]:
        if not isinstance(request, Request):
            message = f"locked() cannot lock a WebSocket, which has no response: use client.lock({named!r}) in it"
            raise ConfigurationError(message, name=named)
        endpoint = inspect.unwrap(request.scope["endpoint"])
        if inspect.isgeneratorfunction(endpoint) or inspect.isasyncgenfunction(endpoint):
            message = (
                f"locked() cannot lock {endpoint.__qualname__}(), which yields its response: the lock would be "
                f"released before its body runs. Use `async with client.lock({named!r})` in an `async def` endpoint"
            )
            raise ConfigurationError(message, name=named)
        can_cancel = cancel_on_lost and inspect.iscoroutinefunction(endpoint)
        settings = {"label": template, **options, "cancel_on_lost": can_cancel}
        async with hold(request, named, timeout=timeout, retry_after=retry_after, **settings) as lease:
            yield lease

    return Depends(hold_lock, scope="function")


def _naming(template: str) -> Callable[[HTTPConnection], str]:
    """Make a dependency that fills in a template."""
    fields = name_fields(template)

    def name_of(request: HTTPConnection) -> str:
        given = {**request.query_params, **request.path_params}
        endpoint, dependant = request.scope["endpoint"], request.scope["route"].dependant
        declared = {
            field: _declared(endpoint, field) or _declared_below(dependant, field) or (None, None, field)
            for field in fields.names
        }
        return filled(fields, {field: _converted(declared[field], given) for field in fields.names})

    return name_of


def _converted(declared: _Declared, given: dict[str, Any]) -> object:
    """Convert a parameter of the request as the endpoint's signature says, so that each value has one name."""
    adapter, default, alias = declared
    value: object
    if alias not in given:
        if default is None:
            raise RequestValidationError(
                [{"type": "missing", "loc": ("path or query", alias), "msg": "Field required"}]
            )
        value = default()
    elif adapter is None:
        value = given[alias]
    else:
        try:
            value = adapter.validate_python(given[alias])
        except ValidationError as error:
            errors = error.errors(include_url=False)
            raise RequestValidationError([{**each, "loc": ("path or query", alias)} for each in errors]) from error
    return value.value if isinstance(value, Enum) else value


def _declared_below(dependant: Dependant, field: str) -> _Declared | None:
    """Find a parameter that only a dependency of the endpoint declares; refuse one that is in a model."""
    for parameter in dependant.query_params:
        kind = parameter.field_info.annotation
        if any(field in getattr(model, "model_fields", ()) for model in (kind, *get_args(kind))):
            raise ConfigurationError(
                f"lock name: {field!r} is a field of the model {parameter.name!r}. Give locked() a dependency that "
                "returns the name"
            )
    for one in dependant.dependencies:
        if one.call and any(parameter.name == field for parameter in (*one.path_params, *one.query_params)):
            return _declared(one.call, field)
        if (found := _declared_below(one, field)) is not None:
            return found
    return None


@functools.cache
def _declared(endpoint: Callable[..., Any], field: str) -> _Declared | None:
    """Find a parameter of an endpoint, or of a dependency."""
    function = inspect.unwrap(endpoint)
    parameter = inspect.signature(function).parameters.get(field)
    if parameter is None:
        return None
    hint: Any = None
    if parameter.annotation is not inspect.Parameter.empty:
        # Only this annotation: others may name what only type checkers import.
        holder = SimpleNamespace(__annotations__={field: parameter.annotation})
        # A dependency may be a class, or an object that can be called.
        module = sys.modules[getattr(function, "func", function).__module__]
        named = getattr(function, "__globals__", vars(module))
        hint = get_type_hints(holder, globalns=named, include_extras=True)[field]
    alias, fixed = field, parameter.default
    default: Callable[[], object] | None = None if fixed is inspect.Parameter.empty else lambda: fixed
    for marker in (*getattr(hint, "__metadata__", ()), fixed):
        if isinstance(marker, _ELSEWHERE):
            # A query parameter of that name, which FastAPI ignores, must not choose the lock.
            raise ConfigurationError(
                f"lock name: {field!r} of {function.__qualname__!r} is not a path or query parameter. Give locked() "
                "a dependency that returns the name"
            )
        if isinstance(marker, FieldInfo):
            alias = next((one for one in (marker.validation_alias, marker.alias) if isinstance(one, str)), field)
            if marker is fixed or default is None:
                made = functools.partial(marker.get_default, call_default_factory=True)
                default = None if marker.is_required() else made
    return None if hint is None else TypeAdapter(hint), default, alias
