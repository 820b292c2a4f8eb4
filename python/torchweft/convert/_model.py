"""A checkpoint as full tensors under torch's names: read from a source, and laid out for a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..checkpoint import Placement
from . import _torch_dist
from ._content import Content
from ._formats import StoredCheckpoint
from ._lazy_tensor import ConversionError, InMemoryTensor, LazyTensor, NarrowedTensor, bitwise_equal, cat, chunk
from ._name_table import NameMatch, NameTable


@dataclass
class Entry:
    """A full tensor, its names in the source, and the rule that matched."""

    lazy: LazyTensor
    sources: list[str]
    match: NameMatch


@dataclass
class Model:
    """A full checkpoint. `format` and `layout` are those of the source; `unknown` are names that matched no rule;
    `stacked` is as in Content."""

    format: str
    layout: str
    entries: dict[str, Entry]
    raw: dict[str, LazyTensor]
    common: dict[str, Any]
    skipped: dict[str, str]
    unknown: list[str] = field(default_factory=list)
    stacked: bool = True


def unstacked_layers(stored: StoredCheckpoint, names: NameTable) -> list[Content]:
    """Returns the content of each rank with one entry per layer."""
    try:
        return [_torch_dist.unstack_layers(content, names.stacks()) for content in stored.ranks]
    except ConversionError as error:
        raise ConversionError(f"{stored.path}: {error}") from error


def read_model(stored: StoredCheckpoint, names: NameTable) -> Model:
    """Merges the ranks of a stored checkpoint."""
    ranks = unstacked_layers(stored, names)
    layout = names.layout_of(ranks[0].tensors)
    for number, content in enumerate(ranks):
        if different := sorted(content.tensors.keys() ^ ranks[0].tensors.keys()):
            raise ConversionError(f"ranks 0 and {number} of {stored.path} have different tensors: {different[0]}, …")
    first = ranks[0]
    if not first.tensors:
        raise ConversionError(f"{stored.path} contains no tensors of a model")
    model = Model(stored.format, layout, {}, first.raw, first.common, dict(first.skipped))
    distributed = stored.format == "torch_dist" and layout == "megatron"
    model.stacked = _torch_dist.is_stacked(stored.ranks[0], names.stacks()) if distributed else first.stacked
    whole = {name: names.match(name, layout) for name in first.tensors}
    shards = {match.native: [content.tensors[name] for content in ranks] for name, match in whole.items()}
    for name, match in whole.items():
        if match.native in model.entries:
            other = model.entries[match.native].sources[0]
            raise ConversionError(
                f"{other} and {name} would both be called {match.native}. Distinguish them with rules in --names"
            )
        if match.rule is None:
            model.unknown.append(name)
        try:
            lazy = merge_shards(shards, match, name, model)
        except ConversionError as error:
            raise ConversionError(f"{name} in {stored.path}: {error}") from error
        model.entries[match.native] = Entry(lazy, [name], match)
    return model


# ---- ranks ----------------------------------------------------------------------------------------------------------


def placement_of(match: NameMatch, lazy: LazyTensor, next_weight: LazyTensor | None) -> Placement | None:
    """Returns the placement of a tensor, full or a shard. `next_weight` shows whether it is gated."""
    if match.rule is None:
        return None
    gated = next_weight is not None and len(next_weight.shape) == 2 and lazy.shape[:1] == (2 * next_weight.shape[1],)
    return match.rule.placement(match.kind, 2 if gated else 1)


def next_weight_name(match: NameMatch) -> str:
    """Returns the name of the weight whose input size shows whether the tensor is gated; empty if it is not."""
    halves = match.rule.halves if match.rule else None
    return halves.format(at=match.at) if halves else ""


def merge_shards(shards_by_name: dict[str, list[LazyTensor]], match: NameMatch, name: str, model: Model) -> LazyTensor:
    """Merges the shards of a tensor. `shards_by_name` has torch's names as keys."""
    shards = shards_by_name[match.native]
    if len(shards) == 1:
        return shards[0]
    next_weight = shards_by_name.get(next_weight_name(match))
    placement = placement_of(match, shards[0], next_weight[0] if next_weight else None)
    if placement is not None and placement.dim is not None:
        chunks = [chunk(shard, placement.stacked, placement.dim) for shard in shards]
        return cat([tensor_chunks[i] for i in range(placement.stacked) for tensor_chunks in chunks], placement.dim)
    if all(bitwise_equal(shards[0], shard) for shard in shards[1:]):
        return shards[0]
    if name.endswith("_extra_state"):
        model.skipped[f"{name} of ranks 1 and up"] = "differs from that of rank 0, which is used"
        return shards[0]
    raise ConversionError(
        "differs between ranks, and no rule says how it is sharded. Add a rule with --names: "
        f'{{"rules": [{{"native": "{match.native}", "{model.layout}": "{name}", "ranks": "rows"}}]}}'
    )


def split(lazy: LazyTensor, placement: Placement | None, ranks: int) -> list[LazyTensor]:
    """Returns the shard of each rank."""
    if placement is None or placement.dim is None or ranks == 1:
        return [lazy] * ranks
    if placement.dim >= len(lazy.shape) or lazy.shape[placement.dim] % (placement.stacked * ranks):
        halves = " in each of its halves" if placement.stacked > 1 else ""
        raise ConversionError(
            f"dimension {placement.dim} of {list(lazy.shape)} does not divide over {ranks} ranks{halves}. Choose "
            "another --tensor-parallel"
        )
    chunks = [chunk(part, ranks, placement.dim) for part in chunk(lazy, placement.stacked, placement.dim)]
    return [cat([tensor_chunks[rank] for tensor_chunks in chunks], placement.dim) for rank in range(ranks)]


# ---- query, key and value -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadCounts:
    """Attention heads and query groups. A joined matrix is ordered by group: its queries, its key, its value."""

    heads: int
    groups: int

    def counts(self) -> list[int]:
        return [self.heads // self.groups, 1, 1]


def saved_arguments(common: dict[str, Any]) -> dict[str, Any]:
    """Returns Megatron's arguments, if the checkpoint has them."""
    args = common.get("args", {})
    args = args.get("of", args) if isinstance(args, dict) else {}
    return args if isinstance(args, dict) else {}


def resolve_heads(common: dict[str, Any], heads: int | None, groups: int | None) -> HeadCounts:
    """Returns the given numbers, or those in Megatron's saved arguments."""
    args = saved_arguments(common)
    heads = heads or args.get("num_attention_heads")
    grouped = args.get("num_query_groups") if args.get("group_query_attention", True) else None
    groups = groups or grouped or heads
    if not heads or not groups:
        raise ConversionError("splitting or joining query, key and value requires --heads (and --groups)")
    if any(type(count) is not int or count < 1 for count in (heads, groups)):
        raise ConversionError("the numbers of heads and groups must be positive integers. Pass --heads and --groups")
    if heads % groups:
        raise ConversionError(f"{heads} heads do not divide into {groups} query groups")
    return HeadCounts(heads, groups)


def check_groups(model: Model, heads: int | None, groups: int | None, ranks: int) -> None:
    """Raises if the query groups, where their number is known, do not divide over the ranks."""
    try:
        found = resolve_heads(model.common, heads, groups)
    except ConversionError:
        return
    if found.groups % ranks:
        raise ConversionError(
            f"{found.groups} query groups do not divide over {ranks} ranks. Choose another --tensor-parallel"
        )


def split_qkv(model: Model, names: NameTable, heads: HeadCounts) -> None:
    """Splits each joined matrix or bias into three."""
    for native in [name for name in model.entries if ".qkv." in f".{name}" and not name.endswith("_extra_state")]:
        entry = model.entries.pop(native)
        rows = entry.lazy.shape[0] if entry.lazy.shape else 0
        channels, rest = divmod(rows, heads.heads + 2 * heads.groups)
        if rest or not channels:
            raise ConversionError(
                f"{native} has {rows} rows, which do not divide into {heads.heads} heads and {heads.groups} groups"
            )
        at = 0
        parts: dict[str, list[LazyTensor]] = {"q": [], "k": [], "v": []}
        for _ in range(heads.groups):
            for part, count in zip(parts.values(), heads.counts(), strict=True):
                part.append(NarrowedTensor(entry.lazy, 0, at, count * channels))
                at += count * channels
        for letter, part in parts.items():
            name = native.replace("qkv.", letter + ".")
            model.entries[name] = Entry(cat(part, 0), entry.sources, names.match(name, "native"))


def join_qkv(model: Model, names: NameTable, heads: HeadCounts) -> None:
    """Inverse of `split_qkv`."""
    for query in [name for name in model.entries if "self_attention.q." in name]:
        three = [query.replace("self_attention.q.", f"self_attention.{letter}.") for letter in "qkv"]
        if missing := [name for name in three if name not in model.entries]:
            raise ConversionError(f"the source has {query}, but not {missing[0]}")
        entries = [model.entries.pop(name) for name in three]
        parts: list[LazyTensor] = []
        for group in range(heads.groups):
            for entry in entries:
                rows = entry.lazy.shape[0] if entry.lazy.shape else 0
                size, rest = divmod(rows, heads.groups)
                if rest or not size:
                    raise ConversionError(f"{query} has {rows} rows, which do not divide into {heads.groups} groups")
                parts.append(NarrowedTensor(entry.lazy, 0, group * size, size))
        name = query.replace("self_attention.q.", "self_attention.qkv.")
        sources = [source for entry in entries for source in entry.sources]
        model.entries[name] = Entry(cat(parts, 0), sources, names.match(name, "native"))


# ---- layout of a target ---------------------------------------------------------------------------------------------


def add_empty_states(model: Model, names: NameTable) -> None:
    """Adds an empty `_extra_state` for every Transformer Engine module without one: Megatron requires them."""
    modules = [
        name.rpartition(".")[0] for name, entry in model.entries.items() if entry.match.rule and entry.match.kind
    ]
    modules += [name.replace(".qkv", ".core_attention") for name in modules if name.endswith("self_attention.qkv")]
    states = {name: names.match(name, "native") for name in (f"{module}._extra_state" for module in modules)}
    missing = [n for n, match in states.items() if n not in model.entries and match.rule and match.rule.megatron]
    if all(name.endswith("core_attention._extra_state") for name in missing):
        return  # all linears have one, so the source is Megatron's
    for name in missing:
        model.entries[name] = Entry(InMemoryTensor(torch.empty(0, dtype=torch.uint8)), [], states[name])


def apply_layout(
    model: Model, names: NameTable, layout: str, ranks: int
) -> list[dict[str, tuple[LazyTensor, Sequence[str]]]]:
    """Returns for each rank {name in `layout`: (tensor, source names)}. Skips tensors without a name in the layout."""
    found: list[dict[str, tuple[LazyTensor, Sequence[str]]]] = [{} for _ in range(ranks)]
    for native, entry in model.entries.items():
        name = names.target_name(native, layout, model.entries)
        if name is None:
            model.skipped[entry.sources[0]] = f"the {layout} layout has no name for it"
            continue
        if name in found[0]:
            raise ConversionError(
                f"{found[0][name][1]} and {entry.sources} would both be called {name}. Distinguish them with rules in "
                "--names"
            )
        next_weight = model.entries.get(next_weight_name(entry.match))
        placement = placement_of(entry.match, entry.lazy, next_weight.lazy if next_weight else None)
        try:
            shards = split(entry.lazy, placement, ranks)
        except ConversionError as error:
            raise ConversionError(f"{name}: {error}") from error
        for rank, shard in enumerate(shards):
            found[rank][name] = shard, entry.sources
    return found
