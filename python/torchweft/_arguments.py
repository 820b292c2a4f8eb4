"""Checks of constructor arguments: errors name the class, what was passed and what it takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch

from . import _C

_Init = TypeVar("_Init", bound=Callable[..., None])


def argument_names(signature: inspect.Signature) -> list[str]:
    """Returns the names of the arguments of a method, without ``self`` and ``**kwargs``; ``*args`` with its star."""
    return [
        f"*{name}" if parameter.kind is parameter.VAR_POSITIONAL else name
        for name, parameter in signature.parameters.items()
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    ]


def reject_unknown(owner: str, name: str, known: list[str]) -> NoReturn:
    """Raises TypeError for a keyword argument, with the nearest one and all that `owner` takes."""
    takes = f"Arguments: {', '.join(known)}" if known else "It takes none"
    raise TypeError(
        f"{owner} got an unexpected keyword argument {name!r}.{_C.did_you_mean(name, known)} {takes}."
    ) from None


def bind(owner: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments by name, with defaults."""
    names = argument_names(signature)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        for name in kwargs:
            if name not in names:
                reject_unknown(owner, name, names)
        raise TypeError(f"{owner}: {error}. Arguments: {', '.join(names)}.") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def checked_arguments(init: _Init) -> _Init:
    """Decorates an ``__init__``, so that errors about its arguments name the class and the arguments it takes."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        bind(type(self).__name__, signature, (self, *args), kwargs)
        init(self, *args, **kwargs)

    return cast(_Init, checked)


def check_device(owner: str, device: Any) -> None:
    """Raises ValueError for a device that torch does not know or cannot use."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"{owner}: device is {device!r}, expected 'cpu', 'meta' or another device of this torch ({reason})."
        ) from None
