"""Conversion of one checkpoint to another format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from . import _atomic_write, _hugging_face, _safetensors, _torch_dist, _torch_zip
from ._check import verify
from ._content import Content, decode_values
from ._formats import RAW, open_checkpoint
from ._lazy_tensor import ConversionError, LazyTensor, OnWrite
from ._model import Model, add_empty_states, apply_layout, check_groups, join_qkv, read_model, resolve_heads, split_qkv
from ._name_table import HUGGING_FACE, LAYOUTS, NameTable, read_names
from ._progress import Progress
from ._report import NamedTensor, make_report, report_path

# format: default layout
TARGETS = {"torch_dist": "megatron", "safetensors": "native", "te": "te", "pt": "megatron", "hf": HUGGING_FACE}
FILES = {"torch_dist": (), "safetensors": (".safetensors",), "te": (".safetensors", ".pt"), "pt": (".pt",), "hf": ()}
SUFFIXES = (".safetensors", ".pt")  # of a target that is a single file
SHARD_SIZE = 4 << 30
# Names of what is in the attention or the MLP of a numbered layer, in any project.
_IN_BLOCK = re.compile(r"(^|\.)\d+\.(.*\.)?\w*(attn|attention|mlp|ffn|feed_forward)\.", re.IGNORECASE)


def convert(
    source: Path | str,
    target: Path | str,
    to: str,
    *,
    layout: str | None = None,
    tensor_parallel: int = 1,
    names: Path | str | None = None,
    unstacked: bool = False,
    split: bool = False,
    heads: int | None = None,
    groups: int | None = None,
    strict: bool = False,
    overwrite: bool = False,
    shard_size: int = SHARD_SIZE,
    check: bool = True,
    quiet: bool = True,
) -> dict[str, Any]:
    """Converts a checkpoint.

    Args:
        source: a file, a folder, or a folder of iterations. Its format is detected.
        target: a folder, or a file that ends in ``.safetensors`` or ``.pt``.
        to: target format: ``"torch_dist"``, ``"safetensors"``, ``"te"``, ``"pt"``, or ``"hf"``: a folder that
            Hugging Face's transformers loads as Llama or GPT-2.
        layout: names to write: ``"native"``, ``"te"`` or ``"megatron"``; None: those of `to`.
        tensor_parallel: number of ranks whose shards are written.
        names: JSON file with name rules that take precedence over the table.
        unstacked: torch_dist: write one tensor per layer instead of stacked layers.
        split: write query, key and value as separate matrices. Requires `heads`, if the source does not store them.
        heads: attention heads.
        groups: query groups; None: as many as heads.
        strict: reject names that match no rule instead of keeping them.
        overwrite: replace an existing target when the conversion is complete.
        shard_size: maximum size of a file in a folder, in bytes.
        check: verify the checksums of the source.
        quiet: print no progress.

    Returns:
        The report that is also written as conversion.json: names, dtypes, shapes, sources and sha256 of all tensors,
        and the names that were skipped, with the reason.

    Raises:
        ConversionError: if the checkpoint is damaged or cannot be converted.

    Example::

        report = torchweft.convert.convert("checkpoint/iter_0000100", "plain", to="safetensors")
    """
    target, layout, table = Path(target), layout or TARGETS.get(to, ""), read_names(names)
    single = target.suffix in SUFFIXES
    _check_request(to, layout, tensor_parallel, target.suffix)
    if to == "hf" and (split or unstacked):
        raise ConversionError("--to hf fixes how tensors are split. Omit --split-qkv and --unstacked")
    _atomic_write.reject_existing(target, overwrite)
    model = _read(source, table, check, strict)
    model.stacked &= not unstacked
    config = _prepare_model(model, table, to, layout, split, heads, groups)
    check_groups(model, heads, groups, tensor_parallel)
    only_tensors = layout != "megatron" and (to in ("pt", "torch_dist") or target.suffix == ".pt")
    ranks = _rank_contents(model, table, to, layout, tensor_parallel, only_tensors)
    total = sum(entry.nbytes for content in ranks for entry in (content.tensors | content.raw).values())
    progress = Progress(total, f"{model.format} -> {to}", quiet)

    def on_write(entry: LazyTensor, view: memoryview) -> None:
        assert isinstance(entry, NamedTensor)
        entry.sha256.update(view)
        progress.add(len(view))

    report_file = report_path(target, single) if single else None
    with _atomic_write.atomic_target(target, single, overwrite, report_file) as partial:
        _write(partial, target.suffix, to, layout, ranks, shard_size, on_write)
        if config is not None:
            (partial / _hugging_face.CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        report = make_report(model, to, layout, ranks)
        text = json.dumps(report, indent=1) + "\n"
        if not single:
            report_path(partial, single).write_text(text)
    if report_file is not None:
        _atomic_write.atomic_write_text(report_file, text)
    progress.finish()
    return report


def _read(source: Path | str, names: NameTable, check: bool, strict: bool) -> Model:
    stored = open_checkpoint(source, check)
    file = report_path(stored.path, stored.path.is_file())
    if check and stored.format.startswith("safetensors") and file.exists():  # safetensors files have no checksums
        if wrong := verify(stored.path):
            raise ConversionError(
                f"{wrong[0]}: {stored.path} is corrupt. Copy it again, or pass --no-check to convert it anyway"
            )
    model = read_model(stored, names)
    _reject_foreign_layers(model, stored.path)
    if strict and model.unknown:
        more = " …" if len(model.unknown) > 5 else ""
        raise ConversionError(
            f"no rule matches {', '.join(model.unknown[:5])}{more}. Add rules with --names, or omit --strict"
        )
    return model


def _reject_foreign_layers(model: Model, path: Path) -> None:
    """Raises if the model has transformer layers, and no rule matches a tensor of their attention or MLP."""
    blocks = [name for entry in model.entries.values() for name in entry.sources if _IN_BLOCK.search(name)]
    foreign = [name for name in model.unknown if _IN_BLOCK.search(name)]
    if not foreign or len(foreign) < len(blocks):
        return
    of_transformers = any(f".{part}." in foreign[0] for part in _hugging_face.PARTS)
    counts = f"{len(model.unknown)} of the {len(model.entries)} tensors"
    raise ConversionError(
        f"no rule matches {counts} of {path}: {', '.join(foreign[:3])}, … "
        f"{'These are names of Hugging Face, which are written, but not read. ' if of_transformers else ''}"
        "Expected names of torch, Transformer Engine or Megatron, as the command `names` prints them. Add rules for "
        "these names with --names"
    )


def _check_request(to: str, layout: str, ranks: int, suffix: str) -> None:
    if to not in TARGETS:
        raise ConversionError(f"to is {to!r}, expected one of {', '.join(TARGETS)}")
    if to == "hf" and (layout != HUGGING_FACE or ranks > 1):
        raise ConversionError("--to hf writes one model under transformers' names. Omit --layout and --tensor-parallel")
    if to != "hf" and layout not in LAYOUTS:
        raise ConversionError(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    if suffix in SUFFIXES and suffix not in FILES[to]:
        raise ConversionError(f"--to {to} cannot write a {suffix} file. Give a folder or another ending")
    if ranks < 1:
        raise ConversionError(f"--tensor-parallel is {ranks}, expected 1 or more")
    if ranks > 1 and to == "torch_dist":
        raise ConversionError("a torch_dist checkpoint can be loaded by any number of ranks. Omit --tensor-parallel")
    if ranks > 1 and suffix in SUFFIXES:
        raise ConversionError(
            "shards of several ranks are written to a folder. Give a target that does not end in .pt or .safetensors"
        )


def _prepare_model(
    model: Model, names: NameTable, to: str, layout: str, split: bool, heads: int | None, groups: int | None
) -> dict[str, Any] | None:
    """Splits or joins query, key and value, and adds the `_extra_state`s that Megatron expects. Returns config.json of
    transformers, if it is to be written."""
    separate = any("self_attention.q." in native for native in model.entries)
    if to == "hf":
        counts = resolve_heads(model.common, heads, groups)
        if separate:
            join_qkv(model, names, counts)
        return _hugging_face.convert_names(model, names, counts)
    if layout == "megatron" and split:
        raise ConversionError("Megatron stores query, key and value as one matrix. Omit --split-qkv")
    if layout == "megatron" and separate:
        join_qkv(model, names, resolve_heads(model.common, heads, groups))
    if split:
        split_qkv(model, names, resolve_heads(model.common, heads, groups))
    if to == "torch_dist" and layout == "megatron":
        add_empty_states(model, names)
    return None


def _rank_contents(
    model: Model, names: NameTable, to: str, layout: str, count: int, only_tensors: bool
) -> list[Content]:
    """Returns the contents of each rank's files."""
    ranks = []
    own_names = [{name: (entry.lazy, entry.sources) for name, entry in model.entries.items()}]
    for entries in own_names if to == "hf" else apply_layout(model, names, layout, count):
        if to == "torch_dist" and layout == "megatron":
            sources = {name: of for name, (_, of) in entries.items()}
            stacks = names.stacks() if model.stacked else []
            joined = _torch_dist.stack_layers({name: lazy for name, (lazy, _) in entries.items()}, stacks)
            entries = {name: (lazy, [s for n in made for s in sources[n]]) for name, (lazy, made) in joined.items()}
        tensors: dict[str, LazyTensor] = {
            name: NamedTensor(name, lazy, list(dict.fromkeys(of))) for name, (lazy, of) in entries.items()
        }
        raw: dict[str, LazyTensor] = {name: NamedTensor(name, lazy, [name]) for name, lazy in model.raw.items()}
        if only_tensors:
            model.skipped |= {name: "a plain state dict contains tensors only" for name in (*raw, *model.common)}
            raw = {}
        ranks.append(Content(tensors, raw, model.common, stacked=model.stacked))
    return ranks


def _write(
    partial: Path, suffix: str, to: str, layout: str, ranks: list[Content], size: int, on_write: OnWrite
) -> None:
    if to == "torch_dist":
        return _torch_dist.write(partial, ranks[0], size, layout == "megatron", on_write)
    pt = to == "pt" or suffix == ".pt"
    if suffix in SUFFIXES:
        if pt:
            return _torch_zip.write(partial, _pt_state_dict(ranks[0], layout), on_write)
        return _safetensors.write_file(partial, ranks[0], on_write)
    for rank, content in enumerate(ranks):
        folder = partial / f"{'mp' if pt else 'tp'}_rank_{rank:02}" if pt or len(ranks) > 1 else partial
        folder.mkdir(exist_ok=True)
        if pt:
            _torch_zip.write(folder / "model_optim_rng.pt", _pt_state_dict(content, layout), on_write)
        else:
            _safetensors.write(folder, content, size, on_write)


def _pt_state_dict(content: Content, layout: str) -> dict[str, Any]:
    """Returns what torch.load will return: a state dict; for Megatron under "model", beside the other values."""
    if layout != "megatron":
        return dict(content.tensors)
    common = {"checkpoint_version": 3.0, **decode_values(content.common)}
    return {"model": dict(content.tensors), **common, **({RAW: dict(content.raw)} if content.raw else {})}
