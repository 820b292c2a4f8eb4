"""From one checkpoint to another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import _atomic_write, _safetensors, _torch_dist, _torch_zip
from ._check import verify
from ._content import Content, decode_values
from ._formats import RAW, open_checkpoint
from ._lazy_tensor import ConversionError, LazyTensor
from ._model import Model, add_empty_states, apply_layout, check_groups, join_qkv, read_model, resolve_heads, split_qkv
from ._name_table import LAYOUTS, NameTable, read_names
from ._progress import Progress
from ._report import NamedTensor, make_report, report_path

TARGETS = {"torch_dist": "megatron", "safetensors": "native", "te": "te", "pt": "megatron"}  # and their names
FILES = {"torch_dist": (), "safetensors": (".safetensors",), "te": (".safetensors", ".pt"), "pt": (".pt",)}
SUFFIXES = (".safetensors", ".pt")  # of a target that is one file
SHARD_SIZE = 4 << 30


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
    """Writes the checkpoint `source` as `target` and returns the report that lies with it.

    `to` is torch_dist, safetensors, te or pt; `layout` gives other names than are usual there; `split` splits query,
    key and value, for which Megatron's arguments or `heads` and `groups` are needed; `unstacked` gives torch_dist a
    tensor for each layer.
    """
    target, layout, table = Path(target), layout or TARGETS.get(to, ""), read_names(names)
    single = target.suffix in SUFFIXES
    _check_request(to, layout, tensor_parallel, target.suffix)
    _atomic_write.reject_existing(target, overwrite)
    model = _read(source, table, check, strict)
    model.stacked &= not unstacked
    _prepare_model(model, table, to, layout, split, heads, groups)
    check_groups(model, heads, groups, tensor_parallel)
    only_tensors = layout != "megatron" and (to in ("pt", "torch_dist") or target.suffix == ".pt")
    ranks = _rank_contents(model, table, to, layout, tensor_parallel, only_tensors)
    total = sum(entry.nbytes for content in ranks for entry in (content.tensors | content.raw).values())
    progress = Progress(total, f"{model.format} -> {to}", quiet)

    def on_write(entry: LazyTensor, view: memoryview) -> None:
        entry.sha256.update(view)
        progress.add(len(view))

    report_file = report_path(target, single) if single else None
    with _atomic_write.atomic_target(target, single, overwrite, report_file) as partial:
        _write(partial, target.suffix, to, layout, ranks, shard_size, on_write)
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
    if check and stored.format.startswith("safetensors") and file.exists():  # they have no checksums of their own
        if wrong := verify(stored.path):
            raise ConversionError(f"{wrong[0]}: {stored.path} is corrupt. Copy it anew; --no-check converts it anyway")
    model = read_model(stored, names)
    if strict and model.unknown:
        more = " …" if len(model.unknown) > 5 else ""
        raise ConversionError(f"no rule knows {', '.join(model.unknown[:5])}{more} (--strict)")
    return model


def _check_request(to: str, layout: str, ranks: int, suffix: str) -> None:
    if to not in TARGETS:
        raise ConversionError(f"to is {to!r}, expected one of {', '.join(TARGETS)}")
    if layout not in LAYOUTS:
        raise ConversionError(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    if suffix in SUFFIXES and suffix not in FILES[to]:
        raise ConversionError(f"--to {to} does not write a file that ends in {suffix}: give a folder or another ending")
    if ranks < 1:
        raise ConversionError(f"--tensor-parallel is {ranks}, expected 1 or more")
    if ranks > 1 and to == "torch_dist":
        raise ConversionError("a torch_dist checkpoint is loaded by any number of ranks: leave out --tensor-parallel")
    if ranks > 1 and suffix in SUFFIXES:
        raise ConversionError(
            "parts of several ranks are written to a folder: give a target without .pt or .safetensors"
        )


def _prepare_model(model: Model, names: NameTable, to: str, layout: str, split: bool, heads, groups) -> None:
    """Query, key and value joined or split, and the states that Megatron expects."""
    separate = any("self_attention.q." in native for native in model.entries)
    if layout == "megatron" and split:
        raise ConversionError("Megatron keeps query, key and value joined: leave out --split-qkv")
    if layout == "megatron" and separate:
        join_qkv(model, names, resolve_heads(model.common, heads, groups))
    if split:
        split_qkv(model, names, resolve_heads(model.common, heads, groups))
    if to == "torch_dist" and layout == "megatron":
        add_empty_states(model, names)


def _rank_contents(
    model: Model, names: NameTable, to: str, layout: str, count: int, only_tensors: bool
) -> list[Content]:
    """What each rank's files will hold."""
    ranks = []
    for entries in apply_layout(model, names, layout, count):
        if to == "torch_dist" and layout == "megatron":
            sources = {name: of for name, (_, of) in entries.items()}
            stacks = names.stacks() if model.stacked else []
            joined = _torch_dist.stack_layers({name: lazy for name, (lazy, _) in entries.items()}, stacks)
            entries = {name: (lazy, [s for n in made for s in sources[n]]) for name, (lazy, made) in joined.items()}
        tensors: dict[str, LazyTensor] = {
            name: NamedTensor(name, lazy, dict.fromkeys(of)) for name, (lazy, of) in entries.items()
        }
        raw: dict[str, LazyTensor] = {name: NamedTensor(name, lazy, [name]) for name, lazy in model.raw.items()}
        if only_tensors:
            model.skipped |= {name: "a plain state dict holds tensors only" for name in (*raw, *model.common)}
            raw = {}
        ranks.append(Content(tensors, raw, model.common, stacked=model.stacked))
    return ranks


def _write(partial: Path, suffix: str, to: str, layout: str, ranks: list[Content], size: int, on_write) -> None:
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
    """What torch.load gives: a state dict, for Megatron under "model" with its other values beside it."""
    if layout != "megatron":
        return dict(content.tensors)
    common = {"checkpoint_version": 3.0, **decode_values(content.common)}
    return {"model": dict(content.tensors), **common, **({RAW: dict(content.raw)} if content.raw else {})}
