"""Contents of a file or folder of a checkpoint under its own names, and small values as JSON."""

from __future__ import annotations

import argparse
import base64
import json
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from ._lazy_tensor import MAX_BLOCK_BYTES, ConversionError, LazyTensor, nonnegative_ints, raw_bytes
from ._pickle_globals import DTYPES, BytesIOContent, OpaqueObject


@dataclass
class Content:
    """Contents of one rank.

    `raw` holds the bytes of opaque objects, `common` other values as JSON, `skipped` names and reasons. `stacked`: a
    distributed checkpoint has one tensor for all layers instead of one per layer.
    """

    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    raw: dict[str, LazyTensor] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    stacked: bool = True


def is_optimizer(name: str) -> bool:
    """Whether a name belongs to optimizer state, in Megatron's and torch's conventions."""
    return re.match(r"(chained_\d+\.|optimizer(\.|$)|optim(\.|$)|opt_param_scheduler)", name) is not None


OPTIMIZER_SKIPPED = "optimizer state is not converted: restart the optimizer"


def bytes_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def parse_json(text: str | bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object and rejects duplicate names."""

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("it has a name twice")
        return found

    try:
        found = json.loads(text, object_pairs_hook=reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{where} is damaged: {error}. Copy the checkpoint again") from error
    if not isinstance(found, dict):
        raise ConversionError(f"{where} contains a JSON {type(found).__name__}, expected an object")
    return found


def as_json(value: Any) -> Any:
    """Encodes a value as JSON that `from_json` decodes; raises TypeError for unsupported types."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and "()" not in value:
            return {key: as_json(item) for key, item in value.items()}
        return {"()": "dict", "of": [[as_json(key), as_json(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, (tuple, set)):
        return {"()": "set" if isinstance(value, set) else "tuple", "of": [as_json(item) for item in value]}
    if isinstance(value, argparse.Namespace):
        return {"()": "Namespace", "of": as_json(vars(value))}
    if isinstance(value, (torch.dtype, torch.device)):
        return {"()": type(value).__name__, "of": str(value).removeprefix("torch.")}
    if isinstance(value, (bytes, BytesIOContent)):
        content = value if isinstance(value, bytes) else value.content
        return {"()": "bytes", "of": base64.b64encode(content).decode()}
    if isinstance(value, LazyTensor):
        content = bytes(raw_bytes(value.tensor()))
        kind = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        return {"()": "tensor", **kind, "of": base64.b64encode(content).decode()}
    raise TypeError(f"a {type(value).__name__}")


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "()" not in value:
        return {key: from_json(item) for key, item in value.items()}
    kind, of = value["()"], value["of"]
    if kind == "dict":
        return {from_json(key): from_json(item) for key, item in of}
    if kind in ("tuple", "set"):
        return (tuple if kind == "tuple" else set)(from_json(item) for item in of)
    if kind == "Namespace":
        found = argparse.Namespace()
        vars(found).update(from_json(of))
        return found
    if kind == "dtype":
        return DTYPES[of]
    if kind == "device":
        return torch.device(of)
    content = base64.b64decode(of)
    if kind == "bytes":
        return content
    return bytes_tensor(content).view(DTYPES[value["dtype"]]).reshape(nonnegative_ints(value["shape"], "a shape"))


def decode_values(common: dict[str, Any]) -> dict[str, Any]:
    """Decodes the values stored beside a model."""
    try:
        return {key: from_json(item) for key, item in common.items()}
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ConversionError(
            f"the values beside the model are damaged: {error!r}. Copy the checkpoint again"
        ) from error


def replace_opaque(value: Any) -> Any:
    """Replaces opaque objects, also inside containers, by text."""
    if isinstance(value, OpaqueObject):
        return repr(value)
    if isinstance(value, dict):
        return {key: replace_opaque(item) for key, item in value.items()}
    if isinstance(value, argparse.Namespace):
        found = argparse.Namespace()
        vars(found).update(replace_opaque(vars(value)))
        return found
    if isinstance(value, (list, tuple, set)):
        return type(value)(replace_opaque(item) for item in value)
    return value


def tensor_bytes(value: Any) -> int:
    if isinstance(value, LazyTensor):
        return value.nbytes
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        return sum(map(tensor_bytes, value.values()))
    return sum(map(tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0


def collect_common(values: dict[Any, Any], content: Content) -> None:
    """Fills `content.common` from the values stored beside a model. Keeps at most MAX_BLOCK_BYTES of tensors."""
    budget = MAX_BLOCK_BYTES
    for key, value in values.items():
        size = tensor_bytes(value)
        if is_optimizer(str(key)):
            content.skipped[str(key)] = OPTIMIZER_SKIPPED
        elif "rng" in str(key):
            content.skipped[str(key)] = "random number states belong to the ranks that saved them"
        elif size > budget:
            content.skipped[str(key)] = f"contains {size} bytes of tensors, more than fit in a value beside the model"
        else:
            budget -= size
            try:
                content.common[str(key)] = as_json(replace_opaque(value))
            except TypeError as error:
                content.skipped[str(key)] = f"contains {error}, which is not converted"
