"""Checkpoint conversion: bitwise round trips, bounded memory, no partial targets."""

import argparse
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import torchweft
from torchweft import convert as weft_convert
from torchweft.checkpoint import Placement
from torchweft.convert import ConversionError, _lazy_tensor, compare, convert, inspect, verify
from torchweft.convert.__main__ import main
from torchweft.convert._name_table import LAYOUTS, RULES, NameTable
from torchweft.convert._progress import Progress

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROOT = Path(torchweft.__file__).parent.parent
HIDDEN, FFN, HEADS, GROUPS = 16, 32, 4, 2


def command(*words: object, **more) -> subprocess.CompletedProcess:
    """Runs ``python -m torchweft.convert`` in a new process."""
    run = [sys.executable, "-m", "torchweft.convert", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(run, env=environment, capture_output=True, text=True, check=False, **more)


@pytest.fixture
def shell(monkeypatch, capsys):
    """Runs the same in this process; returns (status, output and error messages)."""

    def run(*words: object) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["torchweft.convert", *map(str, words)])
        try:
            status = main()
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        return status, printed.out + printed.err + (status if isinstance(status, str) else "")

    return run


def megatron_layers(layers: int = 2, gated: bool = True) -> dict[str, torch.Tensor]:
    """A model as Megatron's distributed checkpoints store it, with stacked layers."""
    rows = 2 * FFN if gated else FFN
    qkv = (HEADS + 2 * GROUPS) * (HIDDEN // HEADS)
    at = "decoder.layers."
    return {
        "embedding.word_embeddings.weight": torch.randn(24, HIDDEN),
        at + "self_attention.linear_qkv.layer_norm_weight": torch.randn(layers, HIDDEN),
        at + "self_attention.linear_qkv.weight": torch.randn(layers, qkv, HIDDEN),
        at + "self_attention.linear_qkv.bias": torch.randn(layers, qkv),
        at + "self_attention.linear_proj.weight": torch.randn(layers, HIDDEN, HIDDEN),
        at + "self_attention.linear_proj.bias": torch.randn(layers, HIDDEN),
        at + "mlp.linear_fc1.layer_norm_weight": torch.randn(layers, HIDDEN),
        at + "mlp.linear_fc1.weight": torch.randn(layers, rows, HIDDEN, dtype=torch.bfloat16),
        at + "mlp.linear_fc1.bias": torch.randn(layers, rows),
        at + "mlp.linear_fc2.weight": torch.randn(layers, HIDDEN, FFN),
        "decoder.final_layernorm.weight": torch.randn(HIDDEN),
        "output_layer.weight": torch.randn(24, HIDDEN),
    }


def states(layers: int = 2) -> dict[str, list]:
    """`_extra_state` of each layer's linears, as Megatron stores it."""
    names = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    return {
        f"decoder.layers.{name}._extra_state/shard_{i}_{layers}": [
            torch.randint(0, 256, (7 * i + len(name),), dtype=torch.uint8)
        ]
        for name in names
        for i in range(layers)
    } | {"decoder.final_layernorm._extra_state/shard_0_1": [torch.empty(0, dtype=torch.uint8)]}


def save_dcp(folder: Path, tensors: dict, common: object = None) -> Path:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(tensors, checkpoint_id=folder, planner=planner, no_dist=True)
    if common is not None:
        torch.save(common, folder / "common.pt")
    return folder


@pytest.fixture
def megatron(tmp_path) -> Path:
    model = megatron_layers() | states()
    args = argparse.Namespace(num_attention_heads=HEADS, num_query_groups=GROUPS, params_dtype=torch.bfloat16)
    common = {"iteration": 7, "args": args, "sizes": (1, 2), "optimizer": {"param_groups": [{"lr": 0.1}]}}
    optimizer = {"optimizer.state.exp_avg.output_layer.weight": torch.randn(24, HIDDEN)}
    objects = {"rng_state/shard_0_1": [{"random": (3, (1, 2)), "seed": 5}]}
    return save_dcp(tmp_path / "megatron", model | optimizer | objects, common)


def assert_no_leftovers(folder: Path, *expected: str) -> None:
    assert sorted(child.name for child in folder.iterdir()) == sorted(expected)


# ---- bits ---------------------------------------------------------------------------------------------------------


def every_dtype() -> dict[str, torch.Tensor]:
    names = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 complex64".split()
    names += ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
    found = {}
    for name in names:
        dtype = getattr(torch, name)
        found[name] = torch.randint(0, 256, (6 * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(2, 3)
    view = torch.randn(9, 8)[1:7:2, 1:6].t()
    shapes = {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "flags": torch.tensor([True, False])}
    return found | shapes | {"strided": view, "part": torch.randn(10)[3:5], "broadcast": torch.randn(3, 1).expand(3, 4)}


def assert_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*flat), name


def test_raw_bytes_of_a_strided_tensor_are_its_values():
    for t in (torch.arange(6).view(2, 3).t(), torch.arange(8)[::2], torch.ones(1).expand(64, 1000)):
        assert bytes(_lazy_tensor.raw_bytes(t)) == t.numpy().tobytes()


def test_every_dtype_and_shape_survives_every_format(tmp_path):
    tensors = every_dtype()
    marked = torch.nn.Parameter(torch.randn(3))
    marked.partition_dim = 0
    torch.save({**tensors, "marked": marked, "parameter": torch.nn.Parameter(torch.randn(2))}, tmp_path / "a.pt")
    tensors = torch.load(tmp_path / "a.pt", weights_only=False)
    convert(tmp_path / "a.pt", tmp_path / "b.safetensors", to="safetensors")
    convert(tmp_path / "b.safetensors", tmp_path / "c", to="torch_dist", layout="native")
    convert(tmp_path / "c", tmp_path / "d.pt", to="pt", layout="native")
    for mapped in (False, True):
        assert_bits(torch.load(tmp_path / "d.pt", weights_only=True, mmap=mapped), tensors)
    assert compare(tmp_path / "a.pt", tmp_path / "c") == (len(tensors), [])
    for target in ("b.safetensors", "c", "d.pt"):
        assert verify(tmp_path / target) == []


def test_safetensors_package_and_torch_read_output(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {name: tensor.contiguous() for name, tensor in every_dtype().items()}
    safetensors.save_file(tensors, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b", to="torch_dist", layout="native")
    loaded = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "b", no_dist=True)
    assert_bits(loaded, tensors)
    report = convert(tmp_path / "b", tmp_path / "c", to="safetensors", shard_size=60)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report["bytes"] and len(set(index["weight_map"].values())) > 3
    files = {name: safetensors.load_file(tmp_path / "c" / name) for name in set(index["weight_map"].values())}
    assert_bits({name: files[file][name] for name, file in index["weight_map"].items()}, tensors)


def test_any_slice_of_strided_tensor_is_read(tmp_path, monkeypatch):
    """Also when a read is limited to a few bytes."""
    draw, whole = random.Random(7), torch.arange(4 * 512, dtype=torch.int32)
    views = []
    for _ in range(100):
        shape = [draw.randint(1, 7) for _ in range(draw.randint(1, 3))]
        views.append(whole.as_strided(shape, [draw.randint(0, 40) for _ in shape], draw.randint(0, 9)))
    torch.save(dict(enumerate(views)), tmp_path / "a.pt")
    found = weft_convert._formats.open_checkpoint(tmp_path / "a.pt").ranks[0].tensors
    for number, view in enumerate(views):
        monkeypatch.setattr(_lazy_tensor, "MAX_READ_BYTES", draw.choice([4, 64, 1 << 20]))
        bounds = tuple(tuple(sorted((draw.randint(0, size), draw.randint(0, size)))) for size in view.shape)
        assert torch.equal(found[str(number)].read(bounds), view[tuple(slice(start, stop) for start, stop in bounds)])


def test_states_and_values_round_trip_bitwise(megatron, tmp_path):
    """torch_dist to safetensors and back, including values and opaque objects."""
    convert(megatron, tmp_path / "plain", to="safetensors")
    assert "layers.1.self_attention.qkv.weight" in inspect(tmp_path / "plain")["tensors"]
    report = convert(tmp_path / "plain", tmp_path / "back", to="torch_dist")
    assert report["unknown"] == [] and report["skipped"] == {}
    assert compare(megatron, tmp_path / "back") == (3 + 2 * 9 + 2 * 4 + 1, [])
    before, after = (weft_convert._formats.open_checkpoint(path).ranks[0] for path in (megatron, tmp_path / "back"))
    assert {name for name in before.tensors} == {name for name in after.tensors}
    assert_bits({n: x.tensor() for n, x in before.raw.items()}, {n: x.tensor() for n, x in after.raw.items()})
    common = torch.load(tmp_path / "back" / "common.pt", weights_only=False)
    assert common["args"].params_dtype == torch.bfloat16 and (common["iteration"], common["sizes"]) == (7, (1, 2))
    assert "optimizer" not in common


def test_numbered_layers_stay_numbered(tmp_path):
    """As with Megatron's non_homogeneous_layers."""
    name = "decoder.layers.{}.mlp.linear_fc2.weight"
    source = save_dcp(tmp_path / "a", {name.format(i): torch.randn(4, 4) for i in range(2)}, {"iteration": 1})
    convert(source, tmp_path / "b.safetensors", to="safetensors")
    convert(tmp_path / "b.safetensors", tmp_path / "c", to="torch_dist")
    assert name.format(1) in inspect(tmp_path / "c")["tensors"]
    torch.save({name.format(i): torch.randn(4, 4) for i in range(2)}, tmp_path / "d.pt")
    convert(tmp_path / "d.pt", tmp_path / "e", to="torch_dist")
    assert inspect(tmp_path / "e")["tensors"]["decoder.layers.mlp.linear_fc2.weight"] == ("float32", [2, 4, 4])
    convert(tmp_path / "d.pt", tmp_path / "f", to="torch_dist", unstacked=True)
    assert name.format(0) in inspect(tmp_path / "f")["tensors"]


def test_optimizer_state_is_skipped_and_reported(megatron, tmp_path):
    report = convert(megatron, tmp_path / "plain", to="safetensors")
    assert "restart the optimizer" in report["skipped"]["optimizer.state.exp_avg.output_layer.weight"]


# ---- names and ranks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_name_in_table_round_trips(layout):
    """A name of a rule maps to the native name, and back if the tensors that the rule needs exist."""
    names, at = NameTable(), "layers.3."
    for rule in RULES:
        name = getattr(rule, layout)
        if name is None:
            continue
        present = {rule.needs.format(at=at)} if rule.needs else set()
        for kind in ("weight", "bias") if "{kind}" in name else ("",):
            path = {"native": "layers.3.", "te": "layers.3.", "megatron": "decoder.layers.3."}[layout]
            given = name.format(at=path, kind=kind)
            known = names.match(given, layout)
            assert known.native == rule.native.format(at=at, kind=kind)
            written = names.target_name(known.native, layout, present)
            # Both forms of the query of cross attention are written under one name.
            assert written == given or rule.native == "{at}cross_attention.q.{kind}"


def test_shards_match_full_tensors_and_merge(megatron, tmp_path):
    whole = {name: x for name, x in megatron_from(megatron).items()}
    convert(megatron, tmp_path / "ranks", to="pt", tensor_parallel=2)
    parts = [torch.load(tmp_path / f"ranks/mp_rank_0{i}/model_optim_rng.pt", weights_only=False) for i in range(2)]
    assert parts[0]["iteration"] == 7 and parts[0]["args"].num_attention_heads == HEADS
    placements = {
        "embedding.word_embeddings.weight": Placement(0),
        "decoder.layers.1.self_attention.linear_qkv.weight": Placement(0),
        "decoder.layers.1.self_attention.linear_qkv.bias": Placement(0),
        "decoder.layers.1.self_attention.linear_proj.weight": Placement(1),
        "decoder.layers.1.mlp.linear_fc1.weight": Placement(0, stacked=2),
        "decoder.layers.1.mlp.linear_fc1.bias": Placement(0, stacked=2),
        "decoder.layers.1.mlp.linear_fc2.weight": Placement(1),
    }
    for name, placement in placements.items():
        for part, expected in zip(parts, placement.split(name, whole[name], 2), strict=True):
            assert torch.equal(part["model"][name], expected), name
    for name in ("decoder.layers.0.self_attention.linear_proj.bias", "decoder.final_layernorm.weight"):
        assert all(torch.equal(part["model"][name], whole[name]) for part in parts)
    convert(tmp_path / "ranks", tmp_path / "merged", to="torch_dist")
    assert compare(megatron, tmp_path / "merged")[1] == []
    assert verify(tmp_path / "ranks") == []


def megatron_from(folder: Path) -> dict[str, torch.Tensor]:
    """Reads a checkpoint layer by layer, with Megatron's names."""
    content = weft_convert._torch_dist.unstack_layers(weft_convert._torch_dist.read(folder, True), ["decoder.layers."])
    return {name: lazy.tensor() for name, lazy in content.tensors.items()}


def test_ungated_fc1_is_split_as_one_matrix(tmp_path):
    source = save_dcp(tmp_path / "a", megatron_layers(gated=False), {})
    whole = megatron_from(source)["decoder.layers.0.mlp.linear_fc1.weight"]
    convert(source, tmp_path / "ranks", to="pt", tensor_parallel=2)
    part = torch.load(tmp_path / "ranks/mp_rank_01/model_optim_rng.pt", weights_only=True)["model"]
    assert torch.equal(part["decoder.layers.0.mlp.linear_fc1.weight"], whole.chunk(2)[1])
    with pytest.raises(ConversionError, match=r"word_embeddings.*\[24, 16\] does not divide over 5 ranks"):
        convert(source, tmp_path / "five", to="pt", tensor_parallel=5)


def test_qkv_is_split_by_group_and_joined(megatron, tmp_path):
    joined = megatron_from(megatron)["decoder.layers.1.self_attention.linear_qkv.weight"]
    convert(
        megatron, tmp_path / "split.pt", to="pt", layout="native", split=True
    )  # heads from Megatron's saved arguments
    found = torch.load(tmp_path / "split.pt", weights_only=True)
    per_group = joined.view(GROUPS, HEADS // GROUPS + 2, HIDDEN // HEADS, HIDDEN)
    q, k, v = per_group.split([HEADS // GROUPS, 1, 1], 1)
    for letter, expected in zip("qkv", (q, k, v), strict=True):
        assert torch.equal(found[f"layers.1.self_attention.{letter}.weight"], expected.flatten(0, 2))
    with pytest.raises(ConversionError, match="--heads"):
        convert(tmp_path / "split.pt", tmp_path / "joined", to="torch_dist")
    convert(tmp_path / "split.pt", tmp_path / "joined", to="torch_dist", heads=HEADS, groups=GROUPS)
    assert torch.equal(megatron_from(tmp_path / "joined")["decoder.layers.1.self_attention.linear_qkv.weight"], joined)


def hugging_face_source(folder: Path, family: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of Megatron, and its tensors by torch's names."""
    gated = family == "llama"
    tensors = {name: t.float() for name, t in megatron_layers(gated=gated).items()}
    at = "decoder.layers."
    if gated:
        tensors = {name: t for name, t in tensors.items() if not name.endswith("bias")}
    else:
        sizes = {"self_attention.linear_qkv.layer_norm_bias": HIDDEN, "mlp.linear_fc1.layer_norm_bias": HIDDEN}
        tensors |= {at + name: torch.randn(2, size) for name, size in (sizes | {"mlp.linear_fc2.bias": HIDDEN}).items()}
        tensors["decoder.final_layernorm.bias"] = torch.randn(HIDDEN)
        tensors["embedding.position_embeddings.weight"] = torch.randn(32, HIDDEN)
        qkv = 3 * HIDDEN
        for name, shape in (("weight", (2, qkv, HIDDEN)), ("bias", (2, qkv))):
            tensors[f"{at}self_attention.linear_qkv.{name}"] = torch.randn(shape)
        del tensors["output_layer.weight"]  # tied
    groups = GROUPS if gated else HEADS
    args = argparse.Namespace(num_attention_heads=HEADS, num_query_groups=groups, norm_epsilon=1e-6, rotary_base=5000)
    return save_dcp(folder / "megatron", tensors | states(), {"args": args}), tensors


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_hugging_face_folder(tmp_path, family):
    source, tensors = hugging_face_source(tmp_path, family)
    report = convert(source, tmp_path / "hf", to="hf")
    load_file = pytest.importorskip("safetensors.torch").load_file
    found, config = load_file(tmp_path / "hf/model.safetensors"), json.loads((tmp_path / "hf/config.json").read_text())
    assert len(found) == report["tensors"] and "args" in report["skipped"]
    assert all("transformers has no" in why for why in report["skipped"].values())
    head_dim, at = HIDDEN // HEADS, "decoder.layers."
    qkv, fc1 = tensors[at + "self_attention.linear_qkv.weight"][1], tensors[at + "mlp.linear_fc1.weight"][1]
    if family == "llama":
        by_group = qkv.view(GROUPS, HEADS // GROUPS + 2, head_dim, HIDDEN)
        expected = {
            "model.embed_tokens.weight": tensors["embedding.word_embeddings.weight"],
            "model.layers.1.self_attn.q_proj.weight": by_group[:, :-2].reshape(-1, HIDDEN),
            "model.layers.1.self_attn.k_proj.weight": by_group[:, -2].reshape(-1, HIDDEN),
            "model.layers.1.self_attn.v_proj.weight": by_group[:, -1].reshape(-1, HIDDEN),
            "model.layers.1.mlp.gate_proj.weight": fc1[:FFN],
            "model.layers.1.mlp.up_proj.weight": fc1[FFN:],
            "model.layers.0.post_attention_layernorm.weight": tensors[at + "mlp.linear_fc1.layer_norm_weight"][0],
            "lm_head.weight": tensors["output_layer.weight"],
        }
        assert len(found) == 3 + 2 * 9 and not config["tie_word_embeddings"] and config["num_key_value_heads"] == GROUPS
        assert config["rope_theta"] == 5000 and config["rms_norm_eps"] == 1e-6
    else:
        by_head = qkv.view(HEADS, 3, head_dim, HIDDEN)
        expected = {
            "transformer.wpe.weight": tensors["embedding.position_embeddings.weight"],
            "transformer.h.1.attn.c_attn.weight": by_head.transpose(0, 1).reshape(-1, HIDDEN).t(),
            "transformer.h.1.mlp.c_fc.weight": fc1.t(),
            "transformer.ln_f.bias": tensors["decoder.final_layernorm.bias"],
        }
        assert len(found) == 4 + 2 * 12 and config["tie_word_embeddings"] and config["n_positions"] == 32
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def plain_logits(tensors: dict[str, torch.Tensor], llama: bool, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a model with Megatron's tensors, in plain torch."""
    at, head_dim, groups = "decoder.layers.", HIDDEN // HEADS, GROUPS if llama else HEADS
    zero = torch.zeros(2, 1)

    def norm(x: torch.Tensor, name: str, layer: int | None) -> torch.Tensor:
        weight, bias = (tensors.get(name + kind) for kind in ("weight", "bias"))
        weight, bias = (t if t is None or layer is None else t[layer] for t in (weight, bias))
        return F.rms_norm(x, (HIDDEN,), weight, 1e-6) if llama else F.layer_norm(x, (HIDDEN,), weight, bias, 1e-6)

    def linear(x: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        return x @ tensors[f"{at}{name}.weight"][layer].t() + tensors.get(f"{at}{name}.bias", zero)[layer]

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [tokens, heads, head_dim]
        if not llama:
            return x
        angles = torch.outer(
            tokens.new_tensor(range(len(x))).float(), 5000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        )
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    x = tensors["embedding.word_embeddings.weight"][tokens]
    x = x if llama else x + tensors["embedding.position_embeddings.weight"][: len(tokens)]
    for layer in range(2):
        qkv = linear(norm(x, at + "self_attention.linear_qkv.layer_norm_", layer), "self_attention.linear_qkv", layer)
        qkv = qkv.view(len(x), groups, -1, head_dim)
        q, k, v = rotate(qkv[:, :, :-2].flatten(1, 2)), rotate(qkv[:, :, -2]), qkv[:, :, -1]
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)
        x = x + linear(y, "self_attention.linear_proj", layer)
        h = linear(norm(x, at + "mlp.linear_fc1.layer_norm_", layer), "mlp.linear_fc1", layer)
        h = F.silu(h[:, :FFN]) * h[:, FFN:] if llama else F.gelu(h, approximate="tanh")
        x = x + linear(h, "mlp.linear_fc2", layer)
    head = tensors.get("output_layer.weight", tensors["embedding.word_embeddings.weight"])
    return norm(x, "decoder.final_layernorm.", None) @ head.t()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_transformers_computes_the_same(tmp_path, family):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    source, tensors = hugging_face_source(tmp_path, family)
    convert(source, tmp_path / "hf", to="hf")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values())
    tokens = torch.tensor([3, 1, 4, 1, 5, 9])
    torch.testing.assert_close(model(tokens[None]).logits[0], plain_logits(tensors, family == "llama", tokens))


def test_hugging_face_mistakes(megatron, tmp_path):
    with pytest.raises(ConversionError, match="this model has MLPs with a gate, no position embeddings, layers.0"):
        convert(megatron, tmp_path / "hf", to="hf")
    source, tensors = hugging_face_source(tmp_path / "llama", "llama")
    common = {"args": argparse.Namespace(num_attention_heads=HEADS, num_query_groups=GROUPS)}
    biased = tensors | {"decoder.final_layernorm.bias": torch.zeros(HIDDEN)}
    changes = {
        "final_norm.bias": (biased, common),
        "no matrix embedding.weight": (
            {name: t for name, t in tensors.items() if "embedding" not in name},
            common,
        ),
        "rotary_percent of this model": (
            tensors,
            {"args": argparse.Namespace(num_attention_heads=HEADS, num_query_groups=GROUPS, rotary_percent=0.5)},
        ),
        "apply_layernorm_1p of this model": (
            tensors,
            {"args": argparse.Namespace(num_attention_heads=HEADS, num_query_groups=GROUPS, apply_layernorm_1p=True)},
        ),
    }
    for i, (text, (changed, saved)) in enumerate(changes.items()):
        with pytest.raises(ConversionError, match=text):
            convert(save_dcp(tmp_path / f"changed{i}", changed, saved), tmp_path / "hf", to="hf")
    with pytest.raises(ConversionError, match="Omit --split-qkv"):
        convert(source, tmp_path / "hf", to="hf", split=True)
    gpt2, _ = hugging_face_source(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ConversionError, match="no query groups"):
        convert(gpt2, tmp_path / "hf", to="hf", groups=2)
    with pytest.raises(ConversionError, match="Omit --layout and --tensor-parallel"):
        convert(source, tmp_path / "hf", to="hf", tensor_parallel=2)
    with pytest.raises(ConversionError, match="cannot write a .safetensors file"):
        convert(source, tmp_path / "hf.safetensors", to="hf")


def test_unknown_names_are_kept_reported_and_rejected_if_strict(tmp_path):
    tensors = {"decoder.layers.0.mlp.router.weight": torch.randn(4, HIDDEN), "odd": torch.randn(2)}
    tensors["decoder.layers.0.mlp.linear_fc2.weight"] = torch.randn(HIDDEN, FFN)
    torch.save({"model": tensors}, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "b", to="safetensors")
    assert report["unknown"] == ["decoder.layers.0.mlp.router.weight", "odd"]
    assert {"layers.0.mlp.router.weight", "odd"} <= inspect(tmp_path / "b")["tensors"].keys()
    with pytest.raises(ConversionError, match=r"router.*--strict"):
        convert(tmp_path / "a.pt", tmp_path / "c", to="safetensors", strict=True)


FOREIGN = {
    "llama": ("model.layers.0.", ["input_layernorm", "self_attn.q_proj", "mlp.down_proj"]),
    "gpt2": ("transformer.h.1.", ["ln_1", "attn.c_attn", "mlp.c_fc"]),
    "bert": ("encoder.layer.0.", ["attention.self.query", "output.dense"]),
    "falcon": ("transformer.h.0.", ["self_attention.query_key_value", "input_layernorm"]),
    "t5": ("encoder.block.0.layer.0.", ["SelfAttention.q", "layer_norm"]),
    "llama of its authors": ("layers.0.", ["attention.wq", "feed_forward.w1", "attention_norm"]),
}


@pytest.mark.parametrize("to", ["safetensors", "torch_dist", "te", "pt"])
@pytest.mark.parametrize("family", FOREIGN)
def test_layers_of_other_projects_are_rejected(tmp_path, family, to):
    at, names = FOREIGN[family]
    torch.save({f"{at}{name}.weight": torch.randn(4, 4) for name in names} | {"x": torch.randn(2)}, tmp_path / "a.pt")
    with pytest.raises(ConversionError, match=r"no rule matches \d of the \d tensors of .*a.pt: .*Add rules .*--names"):
        convert(tmp_path / "a.pt", tmp_path / "b", to=to)
    assert not (tmp_path / "b").exists()


def test_hugging_face_folder_is_not_a_source(tmp_path):
    source, _ = hugging_face_source(tmp_path, "llama")
    convert(source, tmp_path / "hf", to="hf")
    with pytest.raises(ConversionError, match=r"no rule matches 19 of the 21 tensors.*names of Hugging Face"):
        convert(tmp_path / "hf", tmp_path / "back", to="torch_dist")
    rules = {"rules": [{"native": "{at}kept.{kind}", "megatron": "{at}mlp.down_proj.{kind}"}]}
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    report = convert(tmp_path / "hf", tmp_path / "back", to="safetensors", names=tmp_path / "rules.json")
    assert len(report["unknown"]) == 17


def test_layers_of_other_models_keep_their_names(tmp_path):
    torch.save({"layer1.0.conv1.weight": torch.randn(4, 4), "blocks.0.1.weight": torch.randn(4)}, tmp_path / "a.pt")
    assert len(convert(tmp_path / "a.pt", tmp_path / "b", to="safetensors")["unknown"]) == 2


def test_user_rules_take_precedence(tmp_path):
    rules = {
        "rules": [{"native": "{at}gate.{kind}", "megatron": "{at}mlp.router.{kind}", "ranks": "rows"}],
        "paths": [{"native": "h.{layer}.", "megatron": "decoder.layers.{layer}."}],
    }
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    router = torch.randn(4, HIDDEN)
    tensors = {
        "decoder.layers.0.mlp.router.weight": router,
        "decoder.layers.0.mlp.linear_fc2.weight": torch.randn(4, 4),
    }
    torch.save({"model": tensors}, tmp_path / "a.pt")
    given = {"names": tmp_path / "rules.json", "strict": True}
    convert(tmp_path / "a.pt", tmp_path / "b", to="pt", tensor_parallel=2, **given)
    part = torch.load(tmp_path / "b/mp_rank_01/model_optim_rng.pt", weights_only=True)["model"]
    assert torch.equal(part["decoder.layers.0.mlp.router.weight"], router[2:])
    convert(tmp_path / "b", tmp_path / "c.pt", to="pt", layout="native", **given)
    assert torch.equal(torch.load(tmp_path / "c.pt", weights_only=True)["h.0.gate.weight"], router)
    (tmp_path / "rules.json").write_text('{"rules": [{"native": "{wrong}"}]}')
    with pytest.raises(ConversionError, match="wrong.*expected"):
        convert(tmp_path / "a.pt", tmp_path / "d", to="safetensors", **given)


def test_tensor_that_differs_between_ranks_needs_rule(tmp_path):
    for rank in range(2):
        folder = tmp_path / f"a/mp_rank_0{rank}"
        folder.mkdir(parents=True)
        torch.save({"model": {"odd": torch.full((2,), rank)}}, folder / "model_optim_rng.pt")
    with pytest.raises(ConversionError, match="odd in .*: differs between ranks.*--names"):
        convert(tmp_path / "a", tmp_path / "b", to="safetensors")
    shutil.rmtree(tmp_path / "a/mp_rank_00")
    with pytest.raises(ConversionError, match=r"has ranks \[1\]"):
        convert(tmp_path / "a", tmp_path / "b", to="safetensors")


# ---- untrusted files ------------------------------------------------------------------------------------------------


class MaliciousPickle:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def test_file_contents_are_never_executed(megatron, tmp_path):
    mark = tmp_path / "ran"
    torch.save({"model": {"a": torch.ones(1)}, "args": MaliciousPickle(mark)}, tmp_path / "evil.pt")
    with pytest.raises(ConversionError, match=r"posix\.system"):
        convert(tmp_path / "evil.pt", tmp_path / "b", to="safetensors")
    torch.save({"iteration": MaliciousPickle(mark)}, megatron / "common.pt")
    convert(megatron, tmp_path / "c", to="safetensors")  # copied as bytes
    convert(tmp_path / "c", tmp_path / "d", to="torch_dist")
    assert (tmp_path / "d" / "common.pt").read_bytes() == (megatron / "common.pt").read_bytes()
    (megatron / ".metadata").write_bytes(pickle.dumps(MaliciousPickle(mark)))
    with pytest.raises(ConversionError, match=r"\.metadata.*posix\.system.*nothing was executed"):
        convert(megatron, tmp_path / "e", to="safetensors")
    assert not mark.exists()


def test_pickle_cannot_change_classes(megatron, tmp_path):
    for name in ("argparse Namespace", "torch.distributed.checkpoint.metadata Metadata"):
        module, kind = name.split()
        content = b"\x80\x02c%b\n%b\nN}X\x04\x00\x00\x00evilK\x01s\x86b." % (module.encode(), kind.encode())
        (megatron / ".metadata").write_bytes(content)
        with pytest.raises(ConversionError):
            convert(megatron, tmp_path / "b", to="safetensors")
        assert not hasattr(getattr(sys.modules[module], kind), "evil")


def test_megatron_object_is_reported_not_instantiated(tmp_path):
    enums = type(sys)("megatron.core.enums")
    kind = type("Kind", (), {"__module__": "megatron.core.enums", "__reduce__": lambda self: (kind, ())})
    enums.Kind = kind
    modules = {"megatron": type(sys)("megatron"), "megatron.core": type(sys)("megatron.core"), enums.__name__: enums}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        args = argparse.Namespace(kind=kind(), num_layers=2, exit_signal=signal.SIGTERM)
        torch.save({"model": {"a": torch.ones(1)}, "args": args, "state": io.BytesIO(b"xy")}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", to="safetensors")
    found = inspect(tmp_path / "b")["common"]["args"]["of"]
    assert found == {"kind": "megatron.core.enums.Kind()", "num_layers": 2, "exit_signal": "signal.Signals(15)"}


def test_bytesio_states_become_bytes_and_bad_values_are_rejected(tmp_path):
    """Older versions of Transformer Engine store `_extra_state` as io.BytesIO."""
    name = "layers.0.self_attention.layernorm_qkv."
    torch.save({name + "weight": torch.ones(3, 1), name + "_extra_state": io.BytesIO(b"state")}, tmp_path / "te.pt")
    convert(tmp_path / "te.pt", tmp_path / "a.safetensors", to="safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.pt", to="te", layout="te")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert bytes(found["layers.0.self_attention.qkv._extra_state"].tolist()) == b"state"
    content = weft_convert._formats.Content(
        {"a": _lazy_tensor.InMemoryTensor(torch.ones(1))}, common={"x": {"()": "dtype", "of": "hub"}}
    )
    weft_convert._safetensors.write_file(tmp_path / "c.safetensors", content, lambda *_: None)
    with pytest.raises(ConversionError, match="values beside the model are damaged.*hub"):
        convert(tmp_path / "c.safetensors", tmp_path / "d", to="torch_dist")


def test_damaged_source_error_names_tensor(megatron, tmp_path):
    convert(megatron, tmp_path / "a.safetensors", to="safetensors")
    convert(megatron, tmp_path / "a.pt", to="pt")
    before = sorted(child.name for child in tmp_path.iterdir())
    data = next(megatron.glob("*.distcp"))
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConversionError, match=r"\w+\.\w+.*truncated"):
        convert(megatron, tmp_path / "b", to="safetensors")
    place = whole.index(megatron_bytes(whole))
    data.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(ConversionError, match=r"embedding\.weight: .*corrupt.*checksum"):
        convert(megatron, tmp_path / "b", to="safetensors")
    convert(megatron, tmp_path / "forced", to="safetensors", check=False)
    shutil.rmtree(tmp_path / "forced")
    for file in ("a.safetensors", "a.pt"):
        content = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(content[:-700])
        with pytest.raises(ConversionError, match="truncated"):
            convert(tmp_path / file, tmp_path / "b", to="torch_dist")
    assert_no_leftovers(tmp_path, *before)


def megatron_bytes(content: bytes) -> bytes:
    """Returns the first bytes of the embedding, which was drawn first."""
    torch.manual_seed(1234)
    expected = bytes(torch.randn(24, HIDDEN).view(torch.uint8).reshape(-1)[:64].tolist())
    assert expected in content
    return expected


def test_verify_finds_changed_byte(megatron, tmp_path, shell):
    convert(megatron, tmp_path / "a.safetensors", to="safetensors")
    content = bytearray((tmp_path / "a.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "a.safetensors").write_bytes(content)
    (wrong,) = verify(tmp_path / "a.safetensors")
    assert "has changed" in wrong
    (wrong,) = compare(megatron, tmp_path / "a.safetensors")[1]
    assert "differ" in wrong
    with pytest.raises(ConversionError, match="rng_state.*corrupt"):  # the last bytes of the file
        convert(tmp_path / "a.safetensors", tmp_path / "b", to="torch_dist")
    status, said = shell("verify", tmp_path / "a.safetensors")
    assert status == 1 and "has changed" in said


# ---- targets --------------------------------------------------------------------------------------------------------


def test_existing_target_is_kept_without_overwrite_or_on_failure(megatron, tmp_path):
    torch.save({"old": torch.ones(2)}, tmp_path / "old.pt")
    convert(tmp_path / "old.pt", tmp_path / "b", to="safetensors")
    with pytest.raises(ConversionError, match="exists.*--overwrite"):
        convert(megatron, tmp_path / "b", to="safetensors")
    with pytest.raises(ConversionError, match="do not divide"):
        convert(megatron, tmp_path / "b", to="pt", tensor_parallel=5, overwrite=True)
    assert "old" in inspect(tmp_path / "b")["tensors"]
    convert(megatron, tmp_path / "b", to="safetensors", overwrite=True)
    assert "embedding.weight" in inspect(tmp_path / "b")["tensors"]
    (tmp_path / "b").rename(tmp_path / "b.replaced")  # as if it had been killed between the two renames
    with pytest.raises(ConversionError, match="exists"):
        convert(megatron, tmp_path / "b", to="safetensors")
    assert_no_leftovers(tmp_path, "megatron", "old.pt", "b")


def test_full_disk_error_gives_advice_and_leaves_nothing(megatron, tmp_path):
    def limit_file_size() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = command(megatron, tmp_path / "b", "--to", "torch_dist", preexec_fn=limit_file_size)
    assert done.returncode == 1 and "could not be written" in done.stderr and "Free disk space" in done.stderr
    assert "Traceback" not in done.stderr
    assert_no_leftovers(tmp_path, "megatron")


def test_command_line_mistakes_give_errors(megatron, tmp_path, shell):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no checkpoint at all")
    mistakes = {
        (tmp_path / "none", tmp_path / "b", "--to", "te"): "does not exist",
        (tmp_path / "empty", tmp_path / "b", "--to", "te"): "contains nothing",
        (tmp_path / "text", tmp_path / "b", "--to", "te"): "neither a safetensors file nor a zip",
        (megatron, tmp_path / "b", "--to", "torch_dist", "--tensor-parallel", 2): "any number of ranks",
        (megatron, tmp_path / "b.pt", "--to", "pt", "--tensor-parallel", 2): "to a folder",
        (megatron, tmp_path / "b", "--to", "te", "--shard-size", "much"): "not a size",
        (megatron, tmp_path / "b.safetensors", "--to", "pt"): "another ending",
        (megatron / "__0_0.distcp", tmp_path / "b", "--to", "te"): "Pass its folder",
        (megatron / "common.pt", tmp_path / "b", "--to", "te"): "contains no tensors",
        ("verify", megatron): "conversion.json cannot be read",
    }
    for words, answer in mistakes.items():
        status, said = shell(*words)
        assert status and answer in said, said
    assert "--tensor-parallel" in shell("--help")[1]
    assert json.loads(shell("names")[1])["rules"][0]["native"] == "{at}input_norm.{kind}"
    assert_no_leftovers(tmp_path, "megatron", "empty", "text")


def test_every_documented_command_works(megatron, tmp_path, shell, monkeypatch):
    page = (ROOT.parent / "docs" / "convert.md").read_text()
    (tmp_path / "checkpoint").mkdir()
    megatron.rename(tmp_path / "checkpoint" / "iter_0000100")
    monkeypatch.chdir(tmp_path)
    lines = [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    for line in lines:
        status, said = shell(*line.removeprefix("python -m torchweft.convert ").split())
        assert not status, f"{line}\n{said}"
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    Path("rules.json").write_text(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    assert not shell("plain", "ruled", "--to", "safetensors", "--names", "rules.json", "--strict")[0]
    assert len(lines) >= 11


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_redraws_on_terminal_only():
    for stream, lines in ((Terminal(), 1), (io.StringIO(), 2)):
        progress = Progress(3_000_000, "a -> b", stream=stream)
        for _ in range(3):
            progress.next = 0 if progress.done != 1_000_000 else progress.next
            progress.add(1_000_000)
        progress.finish()
        assert stream.getvalue().count("\n") == lines and "100% of 3 MB" in stream.getvalue()
    quiet = io.StringIO()
    Progress(1, "", quiet=True, stream=quiet).add(1)
    assert not quiet.getvalue()


# ---- a large checkpoint ---------------------------------------------------------------------------------------------


def synthetic(folder: Path, megabytes: int) -> Path:
    """Saves a checkpoint of 4 layers in which the vocabulary takes three fifths of the bytes."""
    hidden, layers, elements = 1024, 4, megabytes * 500_000  # of bfloat16
    vocabulary, ffn = int(elements * 0.3 / hidden), int(elements * 0.4 / 3 / hidden / layers) // 8 * 8

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)

    tensors = {
        "embedding.word_embeddings.weight": drawn(vocabulary // 8 * 8, hidden),
        "decoder.layers.mlp.linear_fc1.weight": drawn(layers, 2 * ffn, hidden),
        "decoder.layers.mlp.linear_fc2.weight": drawn(layers, hidden, ffn),
        "decoder.final_layernorm.weight": drawn(hidden),
        "output_layer.weight": drawn(vocabulary // 8 * 8, hidden),
    }
    return save_dcp(folder, tensors | {k: v for k, v in states(layers).items() if "mlp" in k or "final" in k}, {})


MEASURED = """
import json, sys
from torchweft.convert.__main__ import main

def high_water():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])

imported = high_water()
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    main()
print("above", high_water() - imported)
"""


def peak_memory_above_imports(*commands: list[object]) -> int:
    """Returns by how many MB commands of torchweft.convert raise a process's peak memory above that of its imports."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", MEASURED, words]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("above")[1]) // 1024


def convert_and_kill_halfway(source: Path, target: Path) -> None:
    """Starts a conversion and kills it when about half is written; repeats if it was too late."""
    partial, half = target.with_name(target.name + ".partial"), sum(f.stat().st_size for f in source.iterdir()) // 2
    run = [sys.executable, "-m", "torchweft.convert", str(source), str(target), "--to", "safetensors", "--overwrite"]
    for _ in range(5):
        process = subprocess.Popen(run, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            if partial.exists() and sum(f.stat().st_size for f in partial.iterdir()) >= half:
                process.kill()
                break
            time.sleep(0.001)
        if process.wait() == -signal.SIGKILL and not target.exists():
            break
        shutil.rmtree(target)
    assert partial.exists() and not target.exists()


@pytest.mark.parametrize("megabytes", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_large_checkpoint_survives_kill_and_repeat(tmp_path, megabytes):
    """To safetensors, killed, repeated, and back; and to the shards of two ranks and back, in bounded memory."""
    source = synthetic(tmp_path / "source", megabytes)
    size = sum(file.stat().st_size for file in source.iterdir())
    plain, back, ranks, merged = (tmp_path / name for name in ("plain", "back", "ranks", "merged"))
    convert_and_kill_halfway(source, plain)
    above = peak_memory_above_imports(
        [source, plain, "--to", "safetensors"],
        [plain, back, "--to", "torch_dist"],
        [plain, ranks, "--to", "pt", "--tensor-parallel", 2],
        [ranks, merged, "--to", "safetensors"],
    )
    assert not list(tmp_path.glob("*.partial"))
    count, wrong = compare(source, back)
    wrong += compare(source, merged)[1]
    print(f"{size / 1e9:.1f} GB, {above} MB above the interpreter, {len(wrong)} of {count} tensors differ")
    shutil.rmtree(tmp_path)
    assert above <= 300 and not wrong and count == 3 + 2 * 4 + 2 * 4


def test_every_output_has_the_same_count(tmp_path, capsys):
    """Of conversion, inspection and comparison; empty extra states do not count."""
    from torchweft.convert.__main__ import main

    state = {f"layers.{i}.mlp.fc1.weight": torch.randn(8, 4) for i in range(2)}
    state |= {f"layers.{i}.mlp.fc1._extra_state": torch.empty(0, dtype=torch.uint8) for i in range(2)}
    torch.save(state, tmp_path / "a.pt")
    source, target = str(tmp_path / "a.pt"), str(tmp_path / "b.safetensors")
    main([source, target, "--to", "safetensors"])
    main(["inspect", source])
    main(["inspect", target])
    with pytest.raises(SystemExit):
        main(["verify", source, target])
    counts = re.findall(r"(\d+) tensors", capsys.readouterr().out)
    assert counts == ["2"] * 4
    assert json.loads((tmp_path / "b.safetensors.conversion.json").read_text())["tensors"] == 2
