"""Random pipelines: a generator of programs that compose everything that weft does in one process.

A seed determines a `Program`: one or two Sequentials of all kinds of operations, their inputs and a loss; a recipe and
a grad mode for each Sequential; the fusion rules in effect; and a second way to call them: under activation
checkpointing, compiled, or in threads with a recipe and a grad mode each. `run_pipelines.py` runs and judges it.

    generate(seed), generate(seed, compiled=True)   a program
    describe(program)                               what it is
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import plain
import torch
from quantized_operands import Seen

import torchweft
from torchweft import ops, recipe
from torchweft.quantization import Quantizer

DTYPES = [torch.float64] * 8 + [torch.float32] * 5 + [torch.bfloat16] * 4 + [torch.float16] * 3
LEADS = [(3,), (5,), (2, 3), (2, 1, 2), (1,), (), (0,), (2, 0), (16,), (2, 8), (32,)]
LEAD_WEIGHTS = [6, 4, 6, 3, 1, 1, 1, 1, 1, 1, 1]
LEADS_OF_16 = [(16,), (2, 8), (4, 2, 4), (32,)]
WIDTHS = [4, 4, 8, 8, 8, 2, 1]
QUANTIZED_WIDTHS = [8, 16, 16, 32, 48, 4, 1]
VOCABULARY = 4096  # of the fusion linear_cross_entropy


def _custom(role: recipe.QuantizerRole) -> Quantizer:
    return Quantizer("mxfp8", format="e5m2" if role.tensor_type == "input" else "e4m3")


HISTORY = 4
RECIPES: dict[str, recipe.Recipe] = {
    "current": recipe.Float8CurrentScaling(),
    "current, powers of two, E4M3": recipe.Float8CurrentScaling(use_power_2_scales=True, fp8_format=recipe.Format.E4M3),
    "block": recipe.Float8BlockScaling(),
    "block, float32 scales": recipe.Float8BlockScaling(use_f32_scales=True, fp8_format=recipe.Format.HYBRID),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "mxfp8, square blocks": recipe.MXFP8BlockScaling(enable_2d_quantization=True),
    "custom": recipe.CustomRecipe(_custom),
    "nvfp4": recipe.NVFP4BlockScaling(),
    "nvfp4, to nearest": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4, no transform": recipe.NVFP4BlockScaling(disable_rht=True),
    "nvfp4, plain": recipe.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "nvfp4, 4over6": recipe.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE"
    ),
    "delayed": recipe.DelayedScaling(amax_history_len=HISTORY),
}
TRANSFORMED = ("nvfp4", "nvfp4, to nearest")  # requires bfloat16 and rows in groups of 16
STOCHASTIC = ("nvfp4", "nvfp4, no transform")
DETERMINISTIC = [name for name in RECIPES if name not in (*TRANSFORMED, *STOCHASTIC, "delayed")]
OVERRIDES = [None] * 4 + ["high_precision", "dequantized"]

GRADIENTS = ("enable_grad", "set_grad_enabled(True)", "enable_grad in no_grad", "inference_mode(False)")
GRAD_MODES: dict[str, tuple[Callable, ...]] = {
    "enable_grad": (),
    "set_grad_enabled(True)": (lambda: torch.set_grad_enabled(True),),
    "enable_grad in no_grad": (torch.no_grad, torch.enable_grad),
    "inference_mode(False)": (lambda: torch.inference_mode(False),),
    "no_grad": (torch.no_grad,),
    "set_grad_enabled(False)": (lambda: torch.set_grad_enabled(False),),
    "inference_mode": (torch.inference_mode,),
}
RULES = ["default"] * 7 + ["none"] * 2 + ["with norm_linear"]


@dataclass(frozen=True)
class RecipeChoice:
    name: str
    override: str | None = None

    def make(self) -> recipe.Recipe:
        return replace(RECIPES[self.name], backward_override=self.override)

    def __str__(self) -> str:
        return self.name + (f", {self.override} backward" if self.override else "")


@dataclass
class Node:
    """A module, the names of its extra inputs, and the destinations of its extra outputs."""

    module: torch.nn.Module
    shape: tuple[int, ...]  # of its input
    takes: list[str] = field(default_factory=list)
    channel: str | None = None  # of its extra output
    public: bool = False  # its extra output goes to the caller
    nested: list[Node] | None = None
    note: str = ""


@dataclass
class CallerTensor:
    """A tensor of the caller: a leaf, and the view of it that is passed to the call."""

    values: torch.Tensor
    layout: str
    requires_grad: bool

    def leaf(self, values: torch.Tensor) -> torch.Tensor:
        return LAYOUTS[self.layout][0](values)

    def view(self, leaf: torch.Tensor) -> torch.Tensor:
        return LAYOUTS[self.layout][1](leaf)


# layout → (makes a leaf from values, makes the tensor to pass from the leaf)
LAYOUTS: dict[str, tuple[Callable, Callable]] = {
    "contiguous": (lambda t: t.clone(), lambda t: t),
    "transposed": (lambda t: t.transpose(0, -1).contiguous(), lambda t: t.transpose(0, -1)),
    "every other column": (lambda t: t.repeat_interleave(2, -1), lambda t: t[..., ::2]),
    "inner rows": (lambda t: torch.cat([t, t, t]), lambda t: t[t.shape[0] // 3 : 2 * (t.shape[0] // 3)]),
    "computed": (lambda t: t.clone(), lambda t: t * 1),
}


@dataclass(frozen=True)
class Modes:
    """The recipe and the grad mode of each Sequential, in one thread."""

    recipes: tuple[RecipeChoice | None, ...]
    grad_modes: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(f"{r or 'no recipe'} in {m}" for r, m in zip(self.recipes, self.grad_modes, strict=True))


@dataclass
class Program:
    seed: int
    dtype: torch.dtype
    parts: list[list[Node]]
    caller_tensors: dict[str, CallerTensor]
    modes: Modes
    second_input: str = "first"  # input of the second Sequential: "first", the output of the first one, or "x"
    fuse_nested: bool = False
    by_hand: bool = False  # call every module separately instead of the Sequential
    rules: str = "default"
    warm_up: bool = False
    twice: bool = False
    loss: str = "each"
    used: list[int] = field(default_factory=list)
    checkpoint: str | None = None
    backend: str | None = None  # of torch.compile
    dynamic: bool = False
    threads: list[Modes] = field(default_factory=list)

    def nodes(self) -> Iterator[Node]:
        for part in self.parts:
            yield from flat(part)

    def modules(self) -> Iterator[torch.nn.Module]:
        return (node.module for node in self.nodes())

    def parameters(self) -> list[torch.nn.Parameter]:
        return list({id(p): p for m in self.modules() for p in m.parameters()}.values())

    def delayed(self) -> bool:
        return any(r is not None and r.name == "delayed" for r in self.modes.recipes)


def flat(nodes: list[Node]) -> Iterator[Node]:
    for node in nodes:
        yield from flat(node.nested) if node.nested is not None else (node,)


# ---- generating ---------------------------------------------------------------------------------------------------


class Generator:
    def __init__(self, seed: int, compiled: bool = False) -> None:
        self.rng = random.Random(seed)
        torch.default_generator.manual_seed(seed)
        self.dtype = self.rng.choice(DTYPES)
        self.nodes: list[Node] = []
        self.caller_tensors: dict[str, CallerTensor] = {}
        self.channels: dict[str, tuple[int, ...]] = {}
        self.outputs: dict[str, tuple[int, ...]] = {}  # public channels of the first Sequential
        self.pending: list[Callable] = []  # makers of the next modules of a pattern
        self.squares = 0
        self.names = 0
        self.compiled = compiled
        self.in_threads = not compiled and self.chance(0.12)  # threads share torch's generator: nothing is drawn
        self.recipes = (None, None)
        if self.dtype != torch.float64 and self.chance(0.5):
            self.recipes = (self.any_recipe(), self.any_recipe())
        self.recipe: RecipeChoice | None = None  # of the Sequential that is being made
        # Modules run in the other Sequential, too, so what a recipe requires holds for both.
        names = [r.name for r in self.recipes if r is not None]
        self.in_sixteens = any(name in TRANSFORMED for name in names)
        self.delayed = "delayed" in names
        self.widths = QUANTIZED_WIDTHS if names else WIDTHS

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def any_recipe(self) -> RecipeChoice | None:
        names = [
            name
            for name in RECIPES
            if (name not in TRANSFORMED or self.dtype == torch.bfloat16)
            and (name != "delayed" or not self.compiled)
            and (name in DETERMINISTIC or not self.in_threads)
        ]
        names += [name for name in STOCHASTIC if name in names]
        name, override = self.rng.choice(names), self.rng.choice(OVERRIDES)
        return RecipeChoice(name, None if name == "delayed" else override) if self.chance(0.85) else None

    def new_caller_tensor(self, name: str, shape: tuple[int, ...]) -> str:
        layouts = list(LAYOUTS) if shape else ["contiguous", "computed"]
        layout = self.rng.choice(layouts) if self.chance(0.5) else "contiguous"
        self.caller_tensors[name] = CallerTensor(
            torch.rand(shape, dtype=torch.float64) * 2 - 1, layout, self.chance(0.7)
        )
        return name

    def integers(self, name: str, values: list[int] | torch.Tensor) -> str:
        self.names += 1
        values = torch.as_tensor(values).to(self.rng.choice([torch.int32, torch.int64]))
        self.caller_tensors[f"{name}{self.names}"] = CallerTensor(values, "contiguous", False)
        return f"{name}{self.names}"

    # -- one operation

    def unary(self, shape):
        name = self.rng.choice([n for n in plain.UNARY if self.squares < 2 or n != "SReLU"])
        self.squares += name == "SReLU"
        return ops.GELU(self.rng.choice(["tanh", "none"])) if name == "GELU" else getattr(ops, name)()

    def interleave(self, width):
        return self.rng.choice([None, None, *(s for s in (1, 2, 4) if width // 2 % s == 0)])

    def gated(self, shape):
        if shape[-1] % 2 or self.squares >= 2:
            return None
        name = self.rng.choice([*plain.GATES, "SiTUGLU", "ClampedSwiGLU"])
        self.squares += 1
        options = {}
        if name in ("SwiGLU", "SiTUGLU", "ClampedSwiGLU"):
            options["glu_interleave_size"] = self.interleave(shape[-1])
        if name == "SiTUGLU":
            options |= {"beta1": self.rng.choice([4.0, 0.7]), "beta2": self.rng.choice([25.0, 1.5])}
        if name == "ClampedSwiGLU":
            options |= {"limit": self.rng.choice([7.0, 0.6]), "glu_linear_offset": self.rng.choice([1.0, 0.0])}
        return getattr(ops, name)(**options)

    def scaled(self, shape):
        name = self.rng.choice(list(plain.SCALED))
        gated = name not in ("ScaledSReLU", "ScaledTanhSReLU")
        if self.squares >= 2 or (shape[-1] % 2 and gated):
            return None
        self.squares += 1
        if name == "ScaledTanhSReLU":
            return ops.ScaledTanhSReLU(self.rng.choice([0.7, 16.0]))
        return getattr(ops, name)(**({"glu_interleave_size": self.interleave(shape[-1])} if gated else {}))

    def fits_recipe(self, shape) -> bool:
        return not self.in_sixteens or math.prod(shape[:-1]) % 16 == 0

    def linear(self, shape, out: int | None = None):
        if not self.fits_recipe(shape):
            return None
        out = out or self.rng.choice(self.widths)
        if self.chance(0.4):
            return ops.BasicLinear(shape[-1], out, dtype=self.dtype)
        return ops.Linear(shape[-1], out, bias=self.chance(0.7), dtype=self.dtype)

    def grouped(self, shape):
        # Delayed scaling does not support it, and a compiled call records no operands of experts.
        if not self.fits_recipe(shape) or self.delayed or (self.compiled and self.recipes != (None, None)):
            return None
        options = ("bias", "scale_bias", "single_grouped_weight", "single_grouped_bias", "split_path")
        return ops.GroupedLinear(
            self.rng.randint(1, 4),
            shape[-1],
            self.rng.choice(self.widths),
            dtype=self.dtype,
            **{name: self.chance(0.4) for name in options},
        )

    def norm(self, shape):
        if self.chance(0.2):
            return ops.L2Normalization(eps=0.1)
        name = self.rng.choice(["LayerNorm", "RMSNorm"])
        row = shape[-2:] if len(shape) > 2 and self.chance(0.3) else shape[-1:]
        if 0 in row:
            row = shape[-1:]
        options = {"bias": self.chance(0.5)} if name == "LayerNorm" else {}
        return getattr(ops, name)(row, eps=0.1, zero_centered_gamma=self.chance(0.5), dtype=self.dtype, **options)

    def sequence_format(self, shape) -> str:
        return self.rng.choice(["sbhd", "bshd", *(["thd"] * 2 if len(shape) == 2 else [])])

    def self_attention_heads(self, width: int) -> dict | None:
        """Heads, groups and channels of queries, keys and values in one tensor of this width."""
        fitting = [
            (channels, groups)
            for channels in (1, 2, 4, 8)
            for groups in (1, 2)
            if width % (channels * groups) == 0 and width // (channels * groups) >= 3
        ]
        if not fitting:
            return None
        channels, groups = self.rng.choice(fitting)
        heads = width // channels - 2 * groups
        return {
            "num_attention_heads": heads,
            "kv_channels": channels,
            "num_gqa_groups": groups,
            "qkv_layout": self.rng.choice(["group_interleaved", "concatenated"]),
        }

    def rotary(self, shape, heads: dict | None = None, qkv_format: str | None = None):
        if heads is None and self.chance(0.3):
            heads = self.self_attention_heads(shape[-1])
        if heads is None:
            channels = self.rng.choice([1, *(c for c in (2, 4, 8) if shape[-1] % c == 0)])
            heads = {"num_attention_heads": shape[-1] // channels, "kv_channels": channels, "qkv_layout": None}
        channels = heads["kv_channels"]
        if channels % 2:
            return None
        return ops.RotaryEmbedding(
            **heads,
            rotary_dim=self.rng.choice([None, None, 2]),
            interleaved=self.chance(0.5),
            rotary_base=self.rng.choice([10000.0, 10000.0, 100.0, None]),
            qkv_format=qkv_format or self.sequence_format(shape),
        )

    def attention_options(self, shape) -> dict:
        dropout = 0.0 if self.in_threads else self.rng.choice([0.0, 0.0, 0.0, 0.3])
        return {
            "attn_mask_type": self.rng.choice(["causal", "no_mask", "causal_bottom_right"]),
            "window_size": self.rng.choice([None, None, None, (1, -1), (0, 0), (1, 1), (-1, 1)]),
            "softmax_scale": self.rng.choice([None, None, 0.3, -0.2]),
            "attention_dropout": dropout,
        }

    def attention(self, shape, heads: dict | None = None, qkv_format: str | None = None):
        heads = heads or self.self_attention_heads(shape[-1])
        if heads is None:
            return None
        qkv_format = qkv_format or self.sequence_format(shape)
        op = ops.DotProductAttention(**heads, **self.attention_options(shape), qkv_format=qkv_format)
        return op.train(self.chance(0.8))

    def cross_attention(self, shape):
        if len(shape) < 2 or 0 in shape:
            return None
        channels = self.rng.choice([c for c in (1, 2, 4) if shape[-1] % c == 0])
        heads = shape[-1] // channels
        op = ops.CrossDotProductAttention(
            heads,
            channels,
            num_gqa_groups=self.rng.choice([g for g in (1, 2, 3, heads) if heads % g == 0]),
            qkv_format=self.sequence_format(shape),
            **self.attention_options(shape),
        )
        return op.train(self.chance(0.8))

    def reshape(self, shape):
        rows = math.prod(shape[:-1])
        choices = [(-1, shape[-1]), (1, *shape), (-1, 1, shape[-1])]
        if shape[-1] % 2 == 0:
            choices += [(*shape[:-1], 2, shape[-1] // 2), (-1, shape[-1] // 2)]
        if rows % 2 == 0 and rows and shape[-1] <= 4:
            choices.append((-1, 2 * shape[-1]))
        return ops.Reshape(self.rng.choice(choices))

    def structural(self, shape):
        return self.rng.choice(
            [
                lambda: ops.Identity(),
                lambda: ops.Quantize(self.chance(0.5), self.chance(0.5)),
                lambda: ops.AllReduce(),
                lambda: ops.AllGather(),
                lambda: ops.ReduceScatter(),
                lambda: ops.ConstantScale(self.rng.choice([1.0, 0.0, -2.5, 0.5])),
                lambda: ops.ConstantScale(self.rng.choice([-1.5, 0.5])),
                lambda: ops.Bias(shape[-1], dtype=self.dtype),
                lambda: ops.Bias(shape[-1], dtype=self.dtype),
            ]
        )()

    def dropout(self, shape):
        p = self.rng.choice([0.0, 1.0] if self.in_threads else [0.0, 0.5, 0.25, 0.9, 1.0])
        return ops.Dropout(p).train(self.chance(0.7))

    def other(self, shape):
        if self.chance(0.5):
            return torch.nn.Tanh()
        return torch.nn.Linear(shape[-1], self.rng.choice(self.widths), dtype=self.dtype)

    def fork(self, shape):
        return ops.MakeExtraOutput(in_place=self.chance(0.5))

    def join(self, shape):
        return ops.AddExtraInput(in_place=self.chance(0.5))

    def pattern(self, shape):
        """Begins a run of operations that rules fuse, or an attention with its projections."""
        width = shape[-1]
        if self.chance(0.4):
            channels, groups = self.rng.choice([2, 4]), self.rng.choice([1, 2])
            heads = {
                "num_attention_heads": groups * self.rng.choice([1, 2]),
                "kv_channels": channels,
                "num_gqa_groups": groups,
                "qkv_layout": self.rng.choice(["group_interleaved", "concatenated"]),
            }
            qkv_format = self.sequence_format(shape)
            run = [
                lambda shape: self.linear(shape, (heads["num_attention_heads"] + 2 * groups) * channels),
                lambda shape: self.rotary(shape, heads, qkv_format),
                lambda shape: self.attention(shape, heads, qkv_format),
                lambda shape: self.linear(shape, width),
            ]
            if self.chance(0.4):
                del run[1]
        else:
            run = self.rng.choice(
                [
                    [self.norm, self.linear, self.unary, self.linear],
                    [
                        self.norm,
                        lambda shape: self.linear(shape, 2 * width),
                        self.gated,
                        lambda shape: self.linear(shape, width),
                    ],
                    [self.linear, self.unary],
                    [lambda shape: self.linear(shape, width), self.dropout],
                    [self.grouped, self.scaled, self.grouped],
                    [lambda shape: ops.Bias(shape[-1], dtype=self.dtype), self.unary],
                ]
            )
        if self.chance(0.5):
            run = [self.fork, *run, self.join]
        first, *self.pending = run
        return first(shape)

    def module(self, shape) -> torch.nn.Module:
        kinds = {
            self.unary: 4, self.gated: 2, self.scaled: 2, self.linear: 7, self.grouped: 2, self.norm: 3,
            self.rotary: 1.5, self.attention: 1.5, self.cross_attention: 1, self.reshape: 1, self.structural: 4,
            self.dropout: 1.5, self.other: 1, self.fork: 5, self.join: 5, self.pattern: 3,
        }  # fmt: skip
        module = self.pending.pop(0)(shape) if self.pending else None
        while module is None:
            module = self.rng.choices(list(kinds), list(kinds.values()))[0](shape)
        return module

    def again(self, shape) -> Node | None:
        """Reuses a module that already ran."""
        for node in self.rng.sample(self.nodes, len(self.nodes)):
            single = node.nested is None and node.channel is None and not node.takes and not node.public
            by_shape = isinstance(node.module, ops.Reshape | ops.LayerNorm | ops.RMSNorm)
            if single and node.shape[-1] == shape[-1] and not by_shape and self.fits_recipe(shape):
                return Node(node.module, shape, note="once more")
        return None

    # -- its inputs and outputs

    def source(self, shape) -> str:
        """Chooses the source of an extra input of this shape."""
        known = [name for name, s in self.channels.items() if s == shape]
        if known and self.chance(0.75):
            return self.rng.choice(known)
        others = [name for name, s in self.outputs.items() if s == shape]
        if others and self.chance(0.8):
            return self.rng.choice(others)
        others = [
            name for name, g in self.caller_tensors.items() if g.values.shape == shape and g.values.is_floating_point()
        ]
        if others and self.chance(0.3):
            return self.rng.choice(others)  # a tensor that is also used elsewhere, possibly x itself
        self.names += 1
        return self.new_caller_tensor(f"e{self.names}", shape)

    def splits(self, groups: int, rows: int) -> str:
        """Split sizes, some of them 0, whose sum may be smaller than the number of rows."""
        step = 16 if self.in_sixteens else 1
        cuts = sorted(step * self.rng.randint(0, rows // step) for _ in range(groups))
        if self.chance(0.8):
            cuts[-1] = rows
        return self.integers("splits", [b - a for a, b in zip([0, *cuts[:-1]], cuts, strict=True)])

    def offsets(self, rows: int, sequences: int) -> str:
        """The rows at which packed sequences start, some of them empty."""
        return self.integers("offsets", [0, *sorted(self.rng.randint(0, rows) for _ in range(sequences - 1)), rows])

    def classes(self, op, shape) -> str:
        targets = torch.randint(shape[-1], shape[:-1])
        targets[torch.rand(shape[:-1]) < self.rng.choice([0, 0, 0.3])] = op.ignore_index
        if (targets == op.ignore_index).all() and op.reduction == "mean":
            targets = torch.full_like(targets, int(op.ignore_index == 0) if shape[-1] > 1 else 0)
        return self.integers("classes", targets)

    def inputs_of(self, module, shape) -> list[str]:
        """Chooses the sources of all extra inputs."""
        name, rows = type(module).__name__, math.prod(shape[:-1])
        if name == "AddExtraInput":
            return [self.source(shape)]
        if name in plain.SCALED:
            return [self.source(shape[:-1] + (1,) if self.chance(0.3) else shape[:-1])]
        if name == "GroupedLinear":
            scales = [self.source(shape[:-1]) for _ in range(module.num_extra_inputs - 1)]
            return [self.splits(module.num_groups, rows), *scales]
        if name == "CrossEntropy":
            return [self.classes(module, shape)]
        packed, takes = getattr(module, "qkv_format", None) == "thd", []
        if name == "RotaryEmbedding" and module.rotary_base is None:
            length = rows if packed or len(shape) == 1 else shape[0 if module.qkv_format == "sbhd" else -2]
            table = (length + self.rng.choice([0, 1]), (module.rotary_dim or module.kv_channels) // 2)
            takes = [self.source(table), self.source(table)]
        if name == "CrossDotProductAttention":
            keys, dim = self.rng.randint(1, 5), -2 if module.qkv_format == "bshd" else 0
            other = [*shape[:-1], (module.num_gqa_groups or module.num_attention_heads) * module.kv_channels]
            other[dim] = keys
            takes = [self.source(tuple(other)), self.source(tuple(other))]
            sequences = self.rng.randint(1, 3)
            return takes + ([self.offsets(rows, sequences), self.offsets(keys, sequences)] if packed else [])
        return takes + ([self.offsets(rows, self.rng.randint(1, 3))] if packed else [])

    def tie_parameter(self, module) -> str:
        """Makes a new module share a Parameter of an earlier one."""
        if isinstance(module, ops.GroupedLinear) or self.delayed:
            return ""  # all of its parameters are frozen, or none; a scale belongs to a weight
        for name, param in list(module._parameters.items()):
            for node in self.nodes:
                other = node.module._parameters.get(name) if isinstance(node.module, ops.FusibleOperation) else None
                if param is not None and other is not None and other.shape == param.shape and self.chance(0.3):
                    setattr(module, name, other)
                    return f"shares {name} of an earlier one"
        return ""

    def node(self, shape, module: torch.nn.Module | None = None) -> Node:
        if module is None and not self.pending and self.nodes and self.chance(0.06):
            repeated = self.again(shape)
            if repeated is not None:
                return repeated
        module = module or self.module(shape)
        node = Node(module, shape)
        if isinstance(module, ops.FusibleOperation):
            with torch.no_grad():
                for p in module.parameters():
                    if p.dim() == 1:
                        p.add_(torch.rand_like(p) - 0.5)
            node.note = self.tie_parameter(module)
            if self.chance(0.05):
                module.register_forward_hook(lambda *_: None)
                node.note += " hooked"
            node.takes = self.inputs_of(module, shape)
        if isinstance(module, ops.MakeExtraOutput):
            self.names += 1
            node.channel = f"c{self.names}" if self.chance(0.75) else None
            node.public = node.channel is None or self.chance(0.4)
        for slot, name in enumerate(node.takes):
            if name in self.channels:
                module.set_extra_input_channel(slot, name)
        if node.channel is not None:
            module.set_extra_output_channel(0, node.channel, output_to_caller=node.public)
            self.channels[node.channel] = shape
        return node

    def add(self, nodes: list[Node], node: Node) -> tuple[int, ...]:
        """Appends a node, and what records the operands of experts. Returns the shape of its output."""
        shape = output_shape(node)
        if self.recipe is not None and isinstance(node.module, ops.GroupedLinear):
            nodes += [Node(Seen(gradient=False), node.shape), node, Node(Seen(gradient=True), shape)]
        else:
            nodes.append(node)
        self.nodes.append(node)
        return shape

    def part(self, shape, count, depth=0) -> tuple[list[Node], tuple[int, ...]]:
        nodes: list[Node] = []
        while count > 0:
            if depth == 0 and count > 2 and not self.pending and self.chance(0.05):
                size = self.rng.randint(1, 3)
                outside, self.channels = self.channels, {}  # a nested Sequential sees only its own channels
                inner, shape = self.part(shape, size, depth=1)
                self.pending = []
                self.channels = outside | self.channels
                inside = {node.channel for node in inner}
                self.channels = {name: s for name, s in self.channels.items() if name not in inside}
                nodes.append(Node(torchweft.Sequential(*(n.module for n in inner)), shape, nested=inner))
                count -= size
                continue
            shape = self.add(nodes, self.node(shape))
            count -= 1
        self.pending = []
        self.return_unread(nodes)
        return nodes, shape

    def return_unread(self, nodes: list[Node]) -> None:
        """Returns to the caller what no operation reads."""
        read = {name for node in nodes for name in node.takes}
        for node in nodes:
            if node.channel is not None and node.channel not in read and not node.public:
                node.public = True
                node.module.set_extra_output_channel(0, node.channel, output_to_caller=True)

    def losses(self, nodes: list[Node], shape) -> None:
        """Appends CrossEntropy, possibly with a linear that the loss is fused with."""
        if 0 in shape:
            return
        if self.recipes == (None, None) and self.chance(0.15):
            out = VOCABULARY + self.rng.randint(0, 8)
            shape = self.add(nodes, self.node(shape, ops.BasicLinear(shape[-1], out, dtype=self.dtype)))
        loss = ops.CrossEntropy(
            ignore_index=self.rng.choice([-100, -100, 0, -1]),
            label_smoothing=self.rng.choice([0, 0, 0.1]),
            reduction=self.rng.choice(["mean", "sum", "none"]),
            z_loss=self.rng.choice([0, 0, 0.1]),
        )
        self.add(nodes, self.node(shape, loss))

    def program(self, seed: int) -> Program:
        rng = self.rng
        leads = (LEADS_OF_16, [1] * 4) if self.in_sixteens else (LEADS, LEAD_WEIGHTS)
        shape = (*rng.choices(*leads)[0], rng.choice([16, 32, 8] if self.widths is QUANTIZED_WIDTHS else [4, 8, 8]))
        self.new_caller_tensor("x", shape)
        count, first_shape = rng.randint(3, 12), shape
        parts, second_input = [], "first"
        self.recipe = self.recipes[0]
        first, shape = self.part(shape, count if self.chance(0.6) or count < 6 else count // 2)
        parts.append(first)
        if sum(1 for _ in flat(first)) < count:
            forks = [n for n in flat(first) if n.public]
            self.outputs = {f"first.{i}": n.shape for i, n in enumerate(forks)}
            self.channels = {}
            if self.chance(0.3):
                second_input, shape = "x", first_shape
            self.recipe = self.recipes[1]
            second, shape = self.part(shape, count - count // 2)
            parts.append(second)
        if self.chance(0.25):
            self.losses(parts[-1], shape)
        program = Program(
            seed, self.dtype, parts, self.caller_tensors, self.any_modes(len(parts)), second_input=second_input
        )
        self.require_gradients(program)
        program.fuse_nested = self.chance(0.5)
        program.by_hand = self.chance(0.1) and not self.compiled
        program.rules = rng.choice(RULES)
        program.warm_up, program.twice = self.chance(0.3), self.chance(0.15)
        program.loss = rng.choice(["each", "one gradient", "pairs", "sum"])
        outputs = 1 + sum(n.public for part in parts for n in flat(part)) + (len(parts) == 2)
        program.used = sorted(i for i in range(outputs) if self.chance(0.75)) or [0]
        self.call_otherwise(program)
        return program

    def require_gradients(self, program: Program) -> None:
        for p in program.parameters():
            p.requires_grad_(self.chance(0.8))
        for module in program.modules():
            if isinstance(module, ops.GroupedLinear):
                module.requires_grad_(self.chance(0.8))
        frozen = self.rng.random()
        if frozen < 0.05:
            for p in program.parameters():
                p.requires_grad_(False)
        if 0.03 < frozen < 0.08:
            for given in program.caller_tensors.values():
                given.requires_grad = False

    def any_modes(self, parts: int) -> Modes:
        """The grad modes; what inference_mode returns cannot be saved for backward."""
        grad_modes = [self.rng.choice(GRADIENTS) if self.chance(0.9) else self.rng.choice(list(GRAD_MODES))]
        for _ in range(parts - 1):
            before = grad_modes[-1]
            change = before != "inference_mode" and self.chance(0.15)
            same = before if before not in GRADIENTS else self.rng.choice(GRADIENTS)
            grad_modes.append(self.rng.choice(list(GRAD_MODES)) if change else same)
        return Modes(self.recipes[:parts], tuple(grad_modes))

    def call_otherwise(self, program: Program) -> None:
        """The second way to call the program."""
        kinds = ["reentrant", "non-reentrant", "with contexts"]
        if self.delayed:
            kinds = ["with contexts"]  # the others repeat a call with the current scales
        if self.in_threads:
            kinds = ["non-reentrant", "with contexts"]  # torch.autograd.grad
        if self.chance(0.2 if self.in_threads or self.compiled else 0.5):
            program.checkpoint = self.rng.choice(kinds)
        if self.compiled:
            program.backend = "inductor" if self.chance(0.06) else "aot_eager"
            program.dynamic = self.chance(0.1)
        if self.in_threads:
            program.threads = [program.modes, *(self.other_modes(program) for _ in range(self.rng.randint(1, 3)))]

    def other_modes(self, program: Program) -> Modes:
        modes = self.any_modes(len(program.parts))
        if self.dtype == torch.float64 or self.chance(0.2):
            return modes
        recipes = tuple(
            RecipeChoice(self.rng.choice(DETERMINISTIC), self.rng.choice(OVERRIDES)) if self.chance(0.8) else None
            for _ in program.parts
        )
        return replace(modes, recipes=recipes)


def output_shape(node: Node) -> tuple[int, ...]:
    op, shape, name = node.module, node.shape, type(node.module).__name__
    if isinstance(op, torch.nn.Linear | ops.Linear | ops.BasicLinear | ops.GroupedLinear):
        return (*shape[:-1], op.out_features)
    if name == "DotProductAttention":
        return (*shape[:-1], op.num_attention_heads * op.kv_channels)
    if name == "CrossEntropy":
        return shape[:-1] if op.reduction == "none" else ()
    if name == "Reshape":
        return tuple(torch.empty(shape, device="meta").reshape(op.shape).shape)
    gated = name in (*plain.GATES, *plain.GLU_WITH_OPTIONS) or plain.SCALED.get(name, "TanhSReLU") not in (
        "SReLU",
        "TanhSReLU",
    )
    return (*shape[:-1], shape[-1] // 2) if gated else shape


def generate(seed: int, compiled: bool = False) -> Program:
    return Generator(seed, compiled).program(seed)


# ---- describing ---------------------------------------------------------------------------------------------------


def describe(program: Program) -> str:
    """Describes the program, to reproduce a failure."""
    flags = [f for f in ("fuse_nested", "by_hand", "warm_up", "twice") if getattr(program, f)]
    flags += [f"rules: {program.rules}"] * (program.rules != "default")
    flags += [f"checkpoint: {program.checkpoint}"] * (program.checkpoint is not None)
    flags += [f"compiled by {program.backend}{' (dynamic)' * program.dynamic}"] * (program.backend is not None)
    frozen = {id(p) for p in program.parameters() if not p.requires_grad}
    call = f"generate({program.seed}{', compiled=True' if program.backend else ''})"
    lines = [f"seed {program.seed}: pipelines.{call}"]
    lines.append(f"  {program.dtype}; {', '.join(flags) or 'called as it is'}; loss: {program.loss} of {program.used}")
    lines.append(f"  {program.modes}")
    lines += [f"  thread {i}: {modes}" for i, modes in enumerate(program.threads)]
    for name, g in program.caller_tensors.items():
        values = "" if g.values.is_floating_point() else f" {g.values.tolist()}"
        grad = " requires grad" if g.requires_grad else ""
        lines.append(f"  {name}: {tuple(g.values.shape)} {g.layout}{grad}{values}")

    def show(nodes, indent):
        for node in nodes:
            if node.nested is not None:
                lines.append(f"{indent}Sequential:")
                show(node.nested, indent + "  ")
                continue
            text = repr(node.module).replace("\n", "").partition(", dtype")[0]
            text += f" ← {', '.join(node.takes)}" if node.takes else ""
            text += f" → {node.channel or 'caller'}{' and caller' if node.channel and node.public else ''}" * (
                node.channel is not None or node.public
            )
            kept = [name for name, p in node.module.named_parameters() if id(p) in frozen]
            text += f" frozen: {', '.join(kept)}" if kept else ""
            text += " eval" if not node.module.training else ""
            lines.append(f"{indent}{tuple(node.shape)} {text} {node.note}".rstrip())

    for i, part in enumerate(program.parts):
        lines.append(f"  Sequential {i} of {'x' if i == 0 else program.second_input}:")
        show(part, "    ")
    return "\n".join(lines)
