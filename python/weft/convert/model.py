"""A checkpoint with torch's names and whole tensors: made of what lies there, and laid out for a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..checkpoint import Spread
from . import torch_dist
from .content import Content
from .formats import Stored
from .lazy import ConversionError, Held, Lazy, Narrow, cat, chunk, same
from .names import Known, Names


@dataclass
class Entry:
    """A whole tensor, the names it had, and what the table knows of it."""

    lazy: Lazy
    sources: list[str]
    known: Known


@dataclass
class Model:
    """`format` and `layout` are those it was read from, `unknown` names that no rule has; `stacked` as in Content."""

    format: str
    layout: str
    entries: dict[str, Entry]
    raw: dict[str, Lazy]
    common: dict
    skipped: dict[str, str]
    unknown: list[str] = field(default_factory=list)
    stacked: bool = True


def layers_of(stored: Stored, names: Names) -> list[Content]:
    """What each rank has, with an entry for each layer."""
    try:
        return [torch_dist.unstack(content, names.stacks()) for content in stored.ranks]
    except ConversionError as error:
        raise ConversionError(f"{stored.path}: {error}") from error


def read_model(stored: Stored, names: Names) -> Model:
    """What lies there, merged from its ranks."""
    ranks = layers_of(stored, names)
    layout = names.layout_of(ranks[0].tensors)
    for number, content in enumerate(ranks):
        if different := sorted(content.tensors.keys() ^ ranks[0].tensors.keys()):
            raise ConversionError(f"ranks 0 and {number} of {stored.path} have different tensors: {different[0]}, …")
    first = ranks[0]
    if not first.tensors:
        raise ConversionError(f"{stored.path} holds no tensors of a model")
    model = Model(stored.format, layout, {}, first.raw, first.common, dict(first.skipped))
    distributed = stored.format == "torch_dist" and layout == "megatron"
    model.stacked = torch_dist.is_stacked(stored.ranks[0], names.stacks()) if distributed else first.stacked
    whole = {name: names.known(name, layout) for name in first.tensors}
    parts = {known.native: [content.tensors[name] for content in ranks] for name, known in whole.items()}
    for name, known in whole.items():
        if known.native in model.entries:
            other = model.entries[known.native].sources[0]
            raise ConversionError(f"{other} and {name} would both be called {known.native}; tell them apart by --names")
        if known.rule is None:
            model.unknown.append(name)
        try:
            lazy = merged(parts, known, name, model)
        except ConversionError as error:
            raise ConversionError(f"{name} in {stored.path}: {error}") from error
        model.entries[known.native] = Entry(lazy, [name], known)
    return model


# ---- ranks ----------------------------------------------------------------------------------------------------------


def spread_of(known: Known, lazy: Lazy, behind: Lazy | None) -> Spread | None:
    """How a tensor, whole or a rank's part, lies on ranks; `behind` is the matrix that tells whether it is gated."""
    if known.rule is None:
        return None
    gated = behind is not None and len(behind.shape) == 2 and lazy.shape[:1] == (2 * behind.shape[1],)
    return known.rule.spread(known.kind, 2 if gated else 1)


def behind_of(known: Known) -> str | None:
    halves = known.rule.halves if known.rule else None
    return halves.format(at=known.at) if halves else None


def merged(all_parts: dict[str, list[Lazy]], known: Known, name: str, model: Model) -> Lazy:
    """The whole tensor of the ranks' parts, which are found by torch's name."""
    parts = all_parts[known.native]
    if len(parts) == 1:
        return parts[0]
    spread = spread_of(known, parts[0], all_parts.get(behind_of(known), [None])[0])
    if spread is not None:
        pieces = [chunk(part, spread.stacked, spread.dim) for part in parts]
        return cat([piece[i] for i in range(spread.stacked) for piece in pieces], spread.dim)
    if all(same(parts[0], part) for part in parts[1:]):
        return parts[0]
    if name.endswith("_extra_state"):
        model.skipped[f"{name} of ranks from 1 on"] = "differs from that of rank 0, which was taken"
        return parts[0]
    raise ConversionError(
        "differs between ranks, and no rule says how it is split. Give one by --names: "
        f'{{"rules": [{{"native": "{known.native}", "{model.layout}": "{name}", "ranks": "rows"}}]}}'
    )


def split(lazy: Lazy, spread: Spread | None, ranks: int) -> list[Lazy]:
    """Each rank's part."""
    if spread is None or ranks == 1:
        return [lazy] * ranks
    if spread.dim >= len(lazy.shape) or lazy.shape[spread.dim] % (spread.stacked * ranks):
        halves = " in each of its halves" if spread.stacked > 1 else ""
        raise ConversionError(
            f"dimension {spread.dim} of {list(lazy.shape)} does not divide by {ranks} ranks{halves}. Give another "
            "--tensor-parallel"
        )
    pieces = [chunk(part, ranks, spread.dim) for part in chunk(lazy, spread.stacked, spread.dim)]
    return [cat([piece[rank] for piece in pieces], spread.dim) for rank in range(ranks)]


# ---- query, key and value -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """Attention heads and query groups; the joined matrix has group after group: its queries, its key, its value."""

    heads: int
    groups: int

    def counts(self) -> list[int]:
        return [self.heads // self.groups, 1, 1]


def heads_of(common: dict, heads: int | None, groups: int | None) -> Heads:
    """As given, else from the arguments that Megatron saved."""
    args = common.get("args", {})
    args = args.get("of", args) if isinstance(args, dict) else {}
    args = args if isinstance(args, dict) else {}
    heads = heads or args.get("num_attention_heads")
    grouped = args.get("num_query_groups") if args.get("group_query_attention", True) else None
    groups = groups or grouped or heads
    if not heads:
        raise ConversionError("query, key and value can be split or joined only with --heads (and --groups) given")
    if any(type(count) is not int or count < 1 for count in (heads, groups)):
        raise ConversionError("the numbers of heads and groups are not integers from 1 on; give --heads and --groups")
    if heads % groups:
        raise ConversionError(f"{heads} heads do not divide into {groups} query groups")
    return Heads(heads, groups)


def check_groups(model: Model, heads: int | None, groups: int | None, ranks: int) -> None:
    """Each rank has whole query groups, as far as their number is known."""
    try:
        found = heads_of(model.common, heads, groups)
    except ConversionError:
        return
    if found.groups % ranks:
        raise ConversionError(
            f"{found.groups} query groups do not divide by {ranks} ranks. Give another --tensor-parallel"
        )


def split_qkv(model: Model, names: Names, heads: Heads) -> None:
    """Each joined matrix or bias becomes three."""
    for native in [name for name in model.entries if ".qkv." in f".{name}" and not name.endswith("_extra_state")]:
        entry = model.entries.pop(native)
        rows = entry.lazy.shape[0] if entry.lazy.shape else 0
        channels, rest = divmod(rows, heads.heads + 2 * heads.groups)
        if rest or not channels:
            raise ConversionError(f"{native} has {rows} rows, not of {heads.heads} heads and {heads.groups} groups")
        at, parts = 0, {"q": [], "k": [], "v": []}
        for _ in range(heads.groups):
            for part, count in zip(parts.values(), heads.counts(), strict=True):
                part.append(Narrow(entry.lazy, 0, at, count * channels))
                at += count * channels
        for letter, part in parts.items():
            name = native.replace("qkv.", letter + ".")
            model.entries[name] = Entry(cat(part, 0), entry.sources, names.known(name, "native"))


def join_qkv(model: Model, names: Names, heads: Heads) -> None:
    """The inverse."""
    for query in [name for name in model.entries if "self_attention.q." in name]:
        three = [query.replace("self_attention.q.", f"self_attention.{letter}.") for letter in "qkv"]
        if missing := [name for name in three if name not in model.entries]:
            raise ConversionError(f"{query} is there and {missing[0]} is not")
        entries = [model.entries.pop(name) for name in three]
        parts: list[Lazy] = []
        for group in range(heads.groups):
            for entry in entries:
                rows = entry.lazy.shape[0] if entry.lazy.shape else 0
                size, rest = divmod(rows, heads.groups)
                if rest or not size:
                    raise ConversionError(f"{query} has {rows} rows, not of {heads.groups} groups")
                parts.append(Narrow(entry.lazy, 0, group * size, size))
        name = query.replace("self_attention.q.", "self_attention.qkv.")
        sources = [source for entry in entries for source in entry.sources]
        model.entries[name] = Entry(cat(parts, 0), sources, names.known(name, "native"))


# ---- for a target ---------------------------------------------------------------------------------------------------


def add_empty_states(model: Model, names: Names) -> None:
    """Megatron asks for the `_extra_state` of every module of Transformer Engine: empty ones where there are none."""
    modules = [
        name.rpartition(".")[0] for name, entry in model.entries.items() if entry.known.rule and entry.known.kind
    ]
    modules += [name.replace(".qkv", ".core_attention") for name in modules if name.endswith("self_attention.qkv")]
    states = {name: names.known(name, "native") for name in (f"{module}._extra_state" for module in modules)}
    missing = [n for n, known in states.items() if n not in model.entries and known.rule and known.rule.megatron]
    if all(name.endswith("core_attention._extra_state") for name in missing):
        return  # all linears have theirs: they come from Megatron
    for name in missing:
        model.entries[name] = Entry(Held(torch.empty(0, dtype=torch.uint8)), [], states[name])


def laid_out(model: Model, names: Names, layout: str, ranks: int) -> list[dict[str, tuple[Lazy, Sequence[str]]]]:
    """For each rank: name in `layout` -> (tensor, names it had). What has no name there is skipped."""
    found: list[dict] = [{} for _ in range(ranks)]
    for native, entry in model.entries.items():
        name = names.written(native, layout, model.entries)
        if name is None:
            model.skipped[entry.sources[0]] = f"the {layout} layout has no place for it"
            continue
        if name in found[0]:
            raise ConversionError(f"{found[0][name][1]} and {entry.sources} would both be called {name}; use --names")
        behind = model.entries.get(behind_of(entry.known) or "")
        spread = spread_of(entry.known, entry.lazy, behind.lazy if behind else None)
        try:
            parts = split(entry.lazy, spread, ranks)
        except ConversionError as error:
            raise ConversionError(f"{name}: {error}") from error
        for rank, part in enumerate(parts):
            found[rank][name] = part, entry.sources
    return found
