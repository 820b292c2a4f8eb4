"""Random pipelines of everything, judged by `run_pipelines.py`, and faults that they find.

The full size runs in two processes, in one tier each time:

    WEFT_TIER=avx512 pytest -m slow -n 2 tests/python/test_random_pipelines.py -k eager
    pytest -m slow -n 2 tests/python/test_random_pipelines.py -k compiled

WEFT_PIPELINES and WEFT_COMPILED_PIPELINES set other counts.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
import threading

import pipelines
import plain
import pytest
import quantized_operands
import run_pipelines
import torch

from torchweft import _C, _autocast, _delayed_scaling, ops

CHUNK, FAST = 10, 60
EAGER = int(os.environ.get("WEFT_PIPELINES", "20000"))
COMPILED = int(os.environ.get("WEFT_COMPILED_PIPELINES", "2000"))
SHARDS = 2
FAULT_SEEDS = 400  # within which each planted fault is found


@pytest.fixture(autouse=True)
def without_traces(monkeypatch):
    """The compiler logs megabytes for tools that read its traces, and pytest would keep them."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)


def check(seeds, compiled: bool = False) -> None:
    summary = run_pipelines.run_seeds(seeds, compiled)
    print(f"\n{_C.machine_tier()}{', compiled' * compiled}: {summary}")
    assert not summary.wrong, "\n\n".join([str(summary), *summary.reports])


@pytest.mark.parametrize("first", range(0, FAST, CHUNK), ids=lambda first: f"{first}-{first + CHUNK - 1}")
def test_random_pipelines_are_right(first):
    check(range(first, first + CHUNK))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_random_eager_pipelines_are_right(shard):
    check(range(shard, EAGER, SHARDS))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_random_compiled_pipelines_are_right(shard):
    check(range(shard, COMPILED, SHARDS), compiled=True)


# ---- what is generated --------------------------------------------------------------------------------------------


generate = functools.cache(pipelines.generate)  # for what follows


def situations(program: pipelines.Program) -> set[str]:
    """What this program covers."""
    nodes = list(program.nodes())
    sources = collections.Counter(name for n in nodes for name in n.takes)
    found = {type(n.module).__name__ for n in nodes}
    found |= {f"layout {g.layout}" for g in program.caller_tensors.values()}
    found |= {f"note {word}" for n in nodes for word in ("more", "shares", "hooked") if word in n.note}
    found |= {str(program.dtype), f"loss {program.loss}", f"rules {program.rules}", f"{program.checkpoint} checkpoint"}
    for modes in [program.modes, *program.threads]:
        found |= {f"mode {mode}" for mode in modes.grad_modes}
        for choice in filter(None, modes.recipes):
            found |= {f"recipe {choice.name}", f"override {choice.override}"}
    for op in (n.module for n in nodes):
        if type(op).__name__ in (*plain.ATTENTION, "RotaryEmbedding"):
            found.add(f"{type(op).__name__} {op.qkv_format}")
        if type(op).__name__ in plain.ATTENTION:
            found |= {"attention dropout"} if op.attention_dropout and op.training else set()
            found |= {f"window {op.window_size and tuple(op.window_size)}", f"mask {op.attn_mask_type}"}
        if type(op).__name__ == "CrossEntropy":
            found.add(f"loss of {op.reduction}")
        if isinstance(op, ops.BasicLinear) and op.out_features >= pipelines.VOCABULARY:
            found.add("vocabulary")
    other_recipes = {modes.recipes for modes in program.threads}
    facts = {
        "two Sequentials": len(program.parts) == 2,
        "extra output of one Sequential into the other": any(s.startswith("first.") for s in sources),
        "fan-out": any(count > 1 for name, count in sources.items() if name.startswith("c")),
        "x as extra input": "x" in sources,
        "hidden output": any(n.channel and not n.public for n in nodes),
        "nested": any(n.nested is not None for part in program.parts for n in part),
        "no rows": any(0 in n.shape for n in nodes),
        "frozen": any(not p.requires_grad for p in program.parameters()),
        "all frozen": bool(program.parameters()) and not any(p.requires_grad for p in program.parameters()),
        "frozen input": not program.caller_tensors["x"].requires_grad,
        "recipe and experts": "Seen" in found,
        "stochastic rounding and dropout": bool(stochastic(program)) and any(map(drops, nodes)),
        "dropout and checkpoint": program.checkpoint is not None and any(map(drops, nodes)),
        "recipe and checkpoint": program.checkpoint is not None and any(program.modes.recipes),
        "threads with other recipes": len(other_recipes) > 1,
        **{f"{n} threads": len(program.threads) == n for n in (2, 3, 4)},
        **{name: getattr(program, name) for name in ("by_hand", "warm_up", "twice", "fuse_nested", "dynamic")},
        f"backend {program.backend}": True,
    }
    return found | {name for name, holds in facts.items() if holds}


def drops(node: pipelines.Node) -> bool:
    op = node.module
    return isinstance(op, ops.Dropout) and op.training and 0 < op.p < 1


def stochastic(program: pipelines.Program) -> list:
    return [r for r in program.modes.recipes if r and r.name in pipelines.STOCHASTIC and not r.override]


def test_generator_covers_every_op_and_situation():
    seen = set().union(*(situations(generate(seed)) for seed in range(FAULT_SEEDS)))
    seen |= set().union(*(situations(generate(seed, compiled=True)) for seed in range(40)))
    expected = {name for name, *_ in _C.op_types() if name in plain.WRITTEN_OUT}
    expected |= {"Linear", "Tanh", "Seen", "CrossEntropy", "note more", "note shares", "note hooked", "vocabulary"}
    expected |= {f"layout {name}" for name in pipelines.LAYOUTS} | {str(dtype) for dtype in pipelines.DTYPES}
    expected |= {f"loss {how}" for how in ("each", "one gradient", "pairs", "sum")}
    expected |= {f"loss of {how}" for how in ("mean", "sum", "none")}
    expected |= {f"rules {name}" for name in pipelines.RULES} | {f"mode {name}" for name in pipelines.GRAD_MODES}
    expected |= {f"{kind} checkpoint" for kind in ("reentrant", "non-reentrant", "with contexts", None)}
    expected |= {f"recipe {name}" for name in pipelines.RECIPES} | {f"override {o}" for o in pipelines.OVERRIDES}
    expected |= {f"{op} {order}" for op in (*plain.ATTENTION, "RotaryEmbedding") for order in ("sbhd", "bshd", "thd")}
    expected |= {f"mask {mask}" for mask in ("causal", "no_mask", "causal_bottom_right")} | {"attention dropout"}
    expected |= {"window (1, 1)", "backend None", "backend aot_eager", "backend inductor"}
    expected |= {
        "two Sequentials", "extra output of one Sequential into the other", "fan-out", "x as extra input",
        "hidden output", "nested", "no rows", "frozen", "all frozen", "frozen input", "recipe and experts",
        "stochastic rounding and dropout", "dropout and checkpoint", "recipe and checkpoint",
        "threads with other recipes", "2 threads", "3 threads", "4 threads", "by_hand", "warm_up", "twice",
        "fuse_nested", "dynamic",
    }  # fmt: skip
    assert not sorted(expected - seen)


def test_a_seed_makes_the_same_program_again():
    for seed in (3, 17):
        first, second = (pipelines.generate(seed) for _ in range(2))
        assert pipelines.describe(first) == pipelines.describe(second)
        assert all(map(torch.equal, first.parameters(), second.parameters()))


# ---- planted faults -----------------------------------------------------------------------------------------------


def quantized(program: pipelines.Program) -> bool:
    linears = ops.Linear | ops.BasicLinear | ops.GroupedLinear
    parts = zip(program.parts, program.modes.recipes, strict=True)
    return any(r and any(isinstance(n.module, linears) for n in pipelines.flat(nodes)) for nodes, r in parts)


def plant_value(monkeypatch):
    """weft's results are off by 1/1000."""
    change_results(monkeypatch, lambda y: y + y.detach() * 1e-3)


def plant_gradient(monkeypatch):
    """Gradients are scaled by 1.001."""
    change_results(monkeypatch, lambda y: y + (y - y.detach()) * 1e-3)


def change_results(monkeypatch, change):
    run = run_pipelines.Weft.run

    def changed(self, part, x, env, modes):
        y, outputs = run(self, part, x, env, modes)
        return change(y), outputs

    monkeypatch.setattr(run_pipelines.Weft, "run", changed)


def plant_write(monkeypatch):
    """weft writes into a tensor of the caller."""
    run = run_pipelines.Weft.run

    def writing(self, part, x, env, modes):
        x.detach().mul_(1.5)
        return run(self, part, x, env, modes)

    monkeypatch.setattr(run_pipelines.Weft, "run", writing)


def plant_ignored_recipe(monkeypatch):
    """A region does not quantize."""
    change_region(monkeypatch, lambda recipe: None)


def plant_other_format(monkeypatch):
    """A region uses other formats than its recipe."""
    other = pipelines.RECIPES["current, powers of two, E4M3"]
    change_region(monkeypatch, lambda recipe: recipe if recipe is None or recipe.delayed() else other)


def change_region(monkeypatch, change):
    enter = _autocast.autocast.__enter__

    def changed(self):
        self._recipe = change(self._recipe)
        enter(self)

    monkeypatch.setattr(_autocast.autocast, "__enter__", changed)


def plant_leaking_region(monkeypatch):
    """A region applies to the other threads, too."""
    opened, enter, leave = [], _autocast.autocast.__enter__, _autocast.autocast.__exit__

    def entering(self):
        opened.append((threading.get_ident(), self._recipe))
        self._own = self._recipe
        self._recipe = next((r for thread, r in opened if thread != threading.get_ident()), self._recipe)
        enter(self)

    def leaving(self, *error):
        leave(self, *error)
        opened.remove((threading.get_ident(), self._own))

    monkeypatch.setattr(_autocast.autocast, "__enter__", entering)
    monkeypatch.setattr(_autocast.autocast, "__exit__", leaving)


def plant_redrawn_mask(monkeypatch):
    """Checkpointing draws another dropout mask when it repeats a call."""
    redrawing = functools.partial(run_pipelines.checkpoint, preserve_rng_state=False)
    monkeypatch.setattr(run_pipelines, "checkpoint", redrawing)


def plant_draw_with_gradients(monkeypatch):
    """A call with gradients draws one more random number than one without."""
    run = run_pipelines.Weft.run

    def drawing(self, part, x, env, modes):
        if torch.is_grad_enabled():
            torch.rand(1)
        return run(self, part, x, env, modes)

    monkeypatch.setattr(run_pipelines.Weft, "run", drawing)


def plant_current_scales(monkeypatch):
    """A repeated call uses the scales after the update, not those of the first call."""
    monkeypatch.setattr(_delayed_scaling.ForwardScales, "replay", lambda self: run_pipelines.nullcontext())


def plant_other_codes(monkeypatch):
    """The reference scales by another maximum of E4M3, as if weft did."""
    scale = quantized_operands.quantization_reference.float32_scale
    monkeypatch.setattr(
        quantized_operands.quantization_reference, "float32_scale", lambda *args: scale(*args) * plain.np.float32(0.5)
    )


def plant_forgotten_mask(monkeypatch):
    """Attention ignores the window."""
    monkeypatch.setattr(plain, "visible", lambda op, q, k=None: torch.ones(q, k or q, dtype=torch.bool))


def plant_compiled_recipe(monkeypatch):
    """A compiled program is not quantized."""
    enter = _autocast.autocast.__enter__

    def entering(self):
        enter(self)
        _autocast.active.text = ""

    monkeypatch.setattr(_autocast.autocast, "__enter__", entering)


# fault → which programs it can affect, whether compiled
FAULTS = {
    plant_value: (lambda p: p.dtype == torch.float64, False),
    plant_gradient: (lambda p: p.dtype == torch.float64, False),
    plant_write: (lambda p: True, False),
    plant_ignored_recipe: (quantized, False),
    plant_other_format: (quantized, False),
    plant_leaking_region: (lambda p: bool(p.threads) and quantized(p), False),
    plant_redrawn_mask: (lambda p: p.checkpoint is not None and any(map(drops, p.nodes())), False),
    plant_draw_with_gradients: (lambda p: p.warm_up, False),
    plant_current_scales: (lambda p: p.delayed() and p.checkpoint is not None and quantized(p), False),
    plant_other_codes: (quantized, False),
    plant_forgotten_mask: (lambda p: any(type(m).__name__ in plain.ATTENTION for m in p.modules()), False),
    plant_compiled_recipe: (quantized, True),
}


SLOW = [pytest.mark.slow]


@pytest.mark.parametrize(
    "plant", [pytest.param(f, id=f.__name__, marks=SLOW if compiled else []) for f, (_, compiled) in FAULTS.items()]
)
def test_planted_fault_is_found(plant, monkeypatch):
    affects, compiled = FAULTS[plant]
    programs = (generate(seed, compiled) for seed in range(FAULT_SEEDS))
    right = []
    for program in filter(affects, programs):
        with monkeypatch.context() as planted:
            plant(planted)
            found = run_pipelines.find_errors(program)
        if found and not run_pipelines.find_errors(pipelines.generate(program.seed, compiled)):
            print(f"{plant.__name__}: seed {program.seed}, after {len(right)} programs: {found[0]}")
            return
        right.append(program.seed)
    pytest.fail(f"not found in seeds {right}")
