"""Docstrings of the operations, in the form of torch.nn. The text of a field is its description in C++."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable
from typing import Any

_CHOSEN_BY_USERS = {"qkv_format", "qkv_layout"}  # orders of dimensions and of heads, which a shape does not tell
# Arguments that only Python has: type and description.
PYTHON_ARGUMENTS = {
    "device": ("torch.device | str | None", "Device of the Parameters; None means torch's default device."),
    "rng_state_tracker_function": (
        "Callable[[], Any] | None",
        "Returns the :class:`torchweft.RNGStatesTracker` that initializes the weight; None means torch's generator.",
    ),
    "te_keys": (
        "bool",
        "Write Transformer Engine's ``state_dict`` keys, with an empty ``_extra_state``; both kinds of keys load.",
    ),
}
# Types of the fields that Python converts before they reach C++.
CONVERTED_TYPES = {
    "dtype": "torch.dtype | None",
    "process_group": "ProcessGroup | DeviceMesh | None",
    "tensor_parallel_group": "ProcessGroup | DeviceMesh | None",
    "userbuffers_options": "dict[str, Any] | None",
    "sm_margin": "int | dict[str, int]",
}


def _fill(text: str, first: str = "", rest: str = "") -> str:
    return textwrap.fill(
        text, 116, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _section(title: str, entries: Iterable[str]) -> str:
    return "\n".join([title, *(_fill(entry, " " * 4, " " * 8) for entry in entries)])


def _args(signature: inspect.Signature, descriptions: dict[str, str]) -> str:
    def entry(parameter: inspect.Parameter) -> str:
        default = "" if parameter.default is parameter.empty else f" Default: ``{parameter.default!r}``."
        return f"{parameter.name} ({parameter.annotation}): {descriptions[parameter.name]}{default}"

    return _section("Args:", map(entry, signature.parameters.values()))


def _example(name: str, doc: dict[str, str], signature: inspect.Signature, sample: Any) -> str:
    """The call of an instance with the fields of `sample` that are required, and those that users must choose."""
    required = [sample.fields()[p.name] for p in signature.parameters.values() if p.default is p.empty]
    arguments = [repr(v[0] if isinstance(v, list) and len(v) == 1 else v) for v in required]
    arguments += [f"{p}={sample.fields()[p]!r}" for p in signature.parameters if p in _CHOSEN_BY_USERS]
    lines = [
        f">>> op = torchweft.ops.{name}({', '.join(arguments)})",
        f">>> y{', extra' * sample.extra_outputs} = op({doc['example_inputs']})",
        ">>> y.shape",
        f"torch.Size({doc['example_shape']})",
    ]
    return "Example::\n\n" + textwrap.indent("\n".join(lines), " " * 4)


def native_docstring(
    name: str, doc: dict[str, str], signature: inspect.Signature, descriptions: dict[str, str], sample: Any
) -> str:
    """The docstring of a registered operation. `doc` has the members of OpDoc."""
    parts = [
        doc["summary"],
        _fill(doc["details"]),
        _args(signature, descriptions),
        doc["parameters"] and _section("Attributes:", doc["parameters"].split("\n")),
        _section("Shape:", (f"- {line}" for line in doc["shape"].split("\n"))),
        _example(name, doc, signature, sample),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def add_args(cls: type, descriptions: dict[str, str]) -> None:
    """Inserts the arguments into the docstring of a class written in Python, before its attributes."""
    before, title, after = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    cls.__doc__ = f"{before}{_args(inspect.signature(cls), descriptions)}\n\n{title}{after}\n"
