"""Random pipelines, run by weft and by plain PyTorch autograd, and compared.

A seed determines a `Program`: one or two Sequentials of all kinds of operations, their inputs, and a loss. It runs
three times: by weft, in float64 by plain.py (the reference), and in weft's dtype by plain.py (eager). `find_errors`
lists the errors of weft; `describe` describes the pipeline.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import plain
import torch
from tolerances import allowed_in_a_pipeline, distance

import torchweft
from torchweft import ops

DTYPES = [torch.float64] * 8 + [torch.float32] * 5 + [torch.bfloat16] * 4 + [torch.float16] * 3
LEADS = [(3,), (5,), (2, 3), (2, 1, 2), (1,), (), (0,), (2, 0)]
LEAD_WEIGHTS = [6, 4, 6, 3, 1, 1, 1, 1]
WIDTHS = [4, 4, 8, 8, 8, 2, 1]


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


@dataclass
class Program:
    seed: int
    dtype: torch.dtype
    parts: list[list[Node]]
    caller_tensors: dict[str, CallerTensor]
    second_input: str = "first"  # input of the second Sequential: "first", the output of the first one, or "x"
    fuse_nested: bool = False
    by_hand: bool = False  # call every module separately instead of the Sequential
    no_grad: bool = False
    warm_up: bool = False
    twice: bool = False
    loss: str = "each"
    used: list[int] = field(default_factory=list)

    def modules(self) -> Iterator[torch.nn.Module]:
        for part in self.parts:
            yield from (node.module for node in flat(part))

    def parameters(self) -> list[torch.nn.Parameter]:
        return list({id(p): p for m in self.modules() for p in m.parameters()}.values())


def flat(nodes: list[Node]) -> Iterator[Node]:
    for node in nodes:
        yield from flat(node.nested) if node.nested is not None else (node,)


# ---- generating ---------------------------------------------------------------------------------------------------


class Generator:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.dtype = self.rng.choice(DTYPES)
        self.nodes: list[Node] = []
        self.caller_tensors: dict[str, CallerTensor] = {}
        self.channels: dict[str, tuple[int, ...]] = {}
        self.outputs: dict[str, tuple[int, ...]] = {}  # public channels of the first Sequential
        self.squares = 0
        self.names = 0

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def new_caller_tensor(self, name: str, shape: tuple[int, ...]) -> str:
        layouts = list(LAYOUTS) if shape else ["contiguous", "computed"]
        layout = self.rng.choice(layouts) if self.chance(0.5) else "contiguous"
        self.caller_tensors[name] = CallerTensor(
            torch.rand(shape, dtype=torch.float64) * 2 - 1, layout, self.chance(0.7)
        )
        return name

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

    def linear(self, shape):
        out = self.rng.choice(WIDTHS)
        if self.chance(0.4):
            return ops.BasicLinear(shape[-1], out, dtype=self.dtype)
        return ops.Linear(shape[-1], out, bias=self.chance(0.7), dtype=self.dtype)

    def grouped(self, shape):
        options = ("bias", "scale_bias", "single_grouped_weight", "single_grouped_bias", "split_path")
        return ops.GroupedLinear(
            self.rng.randint(1, 4),
            shape[-1],
            self.rng.choice(WIDTHS),
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

    def rotary(self, shape):
        if shape[-1] % 2:
            return None
        channels = self.rng.choice([c for c in (2, 4, 8) if shape[-1] % c == 0])
        return ops.RotaryEmbedding(
            num_attention_heads=shape[-1] // channels,
            kv_channels=channels,
            qkv_layout=None,
            interleaved=self.chance(0.5),
            qkv_format=self.rng.choice(["sbhd", "bshd"]),
        )

    def attention(self, shape):
        layouts = [
            (channels, groups)
            for channels in (1, 2, 4)
            for groups in (1, 2)
            if shape[-1] % (channels * groups) == 0 and shape[-1] // (channels * groups) >= 3
        ]
        if not layouts:
            return None
        channels, groups = self.rng.choice(layouts)
        return ops.DotProductAttention(
            num_attention_heads=shape[-1] // channels - 2 * groups,
            kv_channels=channels,
            num_gqa_groups=groups,
            attn_mask_type=self.rng.choice(["causal", "no_mask"]),
            window_size=self.rng.choice([None, None, (1, -1)]),
            qkv_format=self.rng.choice(["sbhd", "bshd"]),
            qkv_layout=self.rng.choice(["group_interleaved", "concatenated"]),
        )

    def reshape(self, shape):
        rows = 1
        for size in shape[:-1]:
            rows *= size
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
        return ops.Dropout(self.rng.choice([0.0, 0.5, 0.25, 0.9, 1.0])).train(self.chance(0.7))

    def other(self, shape):
        if self.chance(0.5):
            return torch.nn.Tanh()
        return torch.nn.Linear(shape[-1], self.rng.choice(WIDTHS), dtype=self.dtype)

    def fork(self, shape):
        return ops.MakeExtraOutput(in_place=self.chance(0.5))

    def join(self, shape):
        return ops.AddExtraInput(in_place=self.chance(0.5))

    def module(self, shape) -> torch.nn.Module:
        kinds = {
            self.unary: 4, self.gated: 2, self.scaled: 2, self.linear: 7, self.grouped: 2, self.norm: 3,
            self.rotary: 1, self.attention: 1, self.reshape: 1, self.structural: 4, self.dropout: 1, self.other: 1,
            self.fork: 6, self.join: 6,
        }  # fmt: skip
        module = None
        while module is None:
            module = self.rng.choices(list(kinds), list(kinds.values()))[0](shape)
        return module

    def again(self, shape) -> Node | None:
        """Reuses a module that already ran."""
        for node in self.rng.sample(self.nodes, len(self.nodes)):
            single = node.nested is None and node.channel is None and not node.takes and not node.public
            by_shape = isinstance(node.module, ops.Reshape | ops.LayerNorm | ops.RMSNorm)
            if single and node.shape[-1] == shape[-1] and not by_shape:
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
        cuts = sorted(self.rng.randint(0, rows) for _ in range(groups))
        if self.chance(0.8):
            cuts[-1] = rows
        sizes = [b - a for a, b in zip([0, *cuts[:-1]], cuts, strict=True)]
        self.names += 1
        name = f"splits{self.names}"
        self.caller_tensors[name] = CallerTensor(
            torch.tensor(sizes, dtype=self.rng.choice([torch.int32, torch.int64])), "contiguous", False
        )
        return name

    def tie_parameter(self, module) -> str:
        """Makes a new module share a Parameter of an earlier one."""
        if isinstance(module, ops.GroupedLinear):
            return ""  # all of its parameters are frozen, or none
        for name, param in list(module._parameters.items()):
            for node in self.nodes:
                other = node.module._parameters.get(name) if isinstance(node.module, ops.FusibleOperation) else None
                if param is not None and other is not None and other.shape == param.shape and self.chance(0.3):
                    setattr(module, name, other)
                    return f"shares {name} of an earlier one"
        return ""

    def node(self, shape) -> Node:
        if self.nodes and self.chance(0.06):
            repeated = self.again(shape)
            if repeated is not None:
                return repeated
        module = self.module(shape)
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
        if isinstance(module, ops.AddExtraInput):
            node.takes = [self.source(shape)]
        elif type(module).__name__ in plain.SCALED:
            node.takes = [self.source(shape[:-1] + (1,) if self.chance(0.3) else shape[:-1])]
        elif isinstance(module, ops.GroupedLinear):
            node.takes = [self.splits(module.num_groups, math.prod(shape[:-1]))]
            node.takes += [self.source(shape[:-1]) for _ in range(module.num_extra_inputs - 1)]
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

    def part(self, shape, count, depth=0) -> tuple[list[Node], tuple[int, ...]]:
        nodes: list[Node] = []
        while count > 0:
            if depth == 0 and count > 2 and self.chance(0.05):
                size = self.rng.randint(1, 3)
                outside, self.channels = self.channels, {}  # a nested Sequential sees only its own channels
                inner, shape = self.part(shape, size, depth=1)
                self.channels = outside | self.channels
                inside = {node.channel for node in inner}
                self.channels = {name: s for name, s in self.channels.items() if name not in inside}
                nodes.append(Node(torchweft.Sequential(*(n.module for n in inner)), shape, nested=inner))
                count -= size
                continue
            node = self.node(shape)
            nodes.append(node)
            self.nodes.append(node)
            shape = output_shape(node)
            count -= 1
        return nodes, shape

    def program(self, seed: int) -> Program:
        rng = self.rng
        shape = (*rng.choices(LEADS, LEAD_WEIGHTS)[0], rng.choice([4, 8, 8]))
        self.new_caller_tensor("x", shape)
        count, first_shape = rng.randint(3, 12), shape
        parts, second_input = [], "first"
        first, shape = self.part(shape, count if self.chance(0.6) or count < 6 else count // 2)
        parts.append(first)
        if sum(1 for _ in flat(first)) < count:
            forks = [n for n in flat(first) if n.public]
            self.outputs = {f"first.{i}": n.shape for i, n in enumerate(forks)}
            self.channels = {}
            if self.chance(0.3):
                second_input, shape = "x", first_shape
            parts.append(self.part(shape, count - count // 2)[0])
        program = Program(seed, self.dtype, parts, self.caller_tensors, second_input)
        for p in program.parameters():
            p.requires_grad_(self.chance(0.8))
        for module in program.modules():
            if isinstance(module, ops.GroupedLinear):
                module.requires_grad_(self.chance(0.8))
        program.fuse_nested, program.by_hand = self.chance(0.5), self.chance(0.1)
        program.no_grad, program.warm_up, program.twice = self.chance(0.1), self.chance(0.2), self.chance(0.15)
        program.loss = rng.choice(["each", "one gradient", "pairs", "sum"])
        outputs = 1 + sum(n.public for part in parts for n in flat(part)) + (len(parts) == 2)
        program.used = sorted(i for i in range(outputs) if self.chance(0.75)) or [0]
        return program


def output_shape(node: Node) -> tuple[int, ...]:
    if isinstance(node.module, torch.nn.Linear):
        return (*node.shape[:-1], node.module.out_features)
    if not isinstance(node.module, ops.FusibleOperation):
        return node.shape
    x = torch.zeros(node.shape, dtype=torch.float64)
    if isinstance(node.module, ops.GroupedLinear):
        return (*node.shape[:-1], node.module.out_features)
    scaled = type(node.module).__name__ in plain.SCALED
    extras = [torch.ones(node.shape[:-1] if scaled else node.shape) for _ in node.takes]
    with torch.random.fork_rng():
        return tuple(plain.apply(node.module, x, *extras, of=lambda p: p.detach().double())[0].shape)


def generate(seed: int) -> Program:
    return Generator(seed).program(seed)


# ---- running ------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    outputs: list[torch.Tensor]
    grads: dict[str, torch.Tensor | None]
    changed: list[str] = field(default_factory=list)
    warm: list[torch.Tensor] = field(default_factory=list)  # outputs of an earlier call without gradients

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {f"output {i}": t for i, t in enumerate(self.outputs)}
        return named | {f"gradient of {name}": g for name, g in self.grads.items() if g is not None}


def by_weft(program: Program) -> Callable:
    if program.by_hand:
        return lambda nodes, x, env: one_by_one(nodes, x, env, lambda node, x, extras: unpack(node.module(x, *extras)))
    made: dict[int, torchweft.Sequential] = {}

    def run(nodes, x, env):
        if id(nodes) not in made:
            made[id(nodes)] = torchweft.Sequential(*(n.module for n in nodes), fuse_nested=program.fuse_nested)
        channels = {n.channel for n in flat(nodes)}
        extras = [env[name] for n in flat(nodes) for name in n.takes if name not in channels]
        return unpack(made[id(nodes)](x, *extras))

    return run


def by_plain(of: plain.Of) -> Callable:
    def call(node, x, extras):
        if isinstance(node.module, ops.FusibleOperation):
            return plain.apply(node.module, x, *extras, of=of)
        param_copies = {name: of(p) for name, p in node.module.named_parameters()}
        return torch.func.functional_call(node.module, param_copies, (x,)), ()

    return lambda nodes, x, env: one_by_one(nodes, x, env, call)


def unpack(result):
    return (result[0], result[1:]) if isinstance(result, tuple) else (result, ())


def one_by_one(nodes, x, env, call):
    env, outputs = dict(env), []
    for node in flat(nodes):
        x, extra = call(node, x, [env[name] for name in node.takes])
        if node.channel is not None:
            env[node.channel] = extra[0]
        if node.public:
            outputs.append(extra[0])
    return x, outputs


def forward(program: Program, run: Callable, leaves: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns [output, extra outputs…, output of the first Sequential if there are two]."""
    torch.manual_seed(program.seed)
    env = {name: given.view(leaves[name]) for name, given in program.caller_tensors.items()}
    y, outputs = run(program.parts[0], env["x"], env)
    if len(program.parts) == 1:
        return [y, *outputs]
    env |= {f"first.{i}": t for i, t in enumerate(outputs)}
    env["first"] = y
    last, more = run(program.parts[1], env[program.second_input], env)
    return [last, *outputs, *more, y]


def targets(program: Program, outputs: list[torch.Tensor], incoming: list[torch.Tensor]):
    """Returns (tensors, their gradients) for torch.autograd.backward."""
    used = [i for i in program.used if outputs[i].requires_grad]
    if program.loss == "sum":
        return ([sum(outputs[i].sum() for i in used)], [None]) if used else ([], [])
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i in used:
        by_shape.setdefault(tuple(outputs[i].shape), []).append(i)
    groups = list(by_shape.values())
    if program.loss == "pairs":  # a sum passes the same gradient to all its terms
        return [sum(outputs[i] for i in group) for group in groups], [incoming[group[0]] for group in groups]
    if program.loss == "one gradient":
        return [outputs[i] for group in groups for i in group], [incoming[g[0]] for g in groups for _ in g]
    return [outputs[i] for i in used], [incoming[i] for i in used]


def nearby(t: torch.Tensor, dtype: torch.dtype, neighbour: int | None) -> torch.Tensor:
    """Returns t in `dtype`; for a neighbour each value is moved by up to one rounding. Integers do not change."""
    if not t.is_floating_point():
        return t
    if neighbour is None:
        return t.detach().to(dtype)
    generator = torch.Generator().manual_seed(neighbour)
    move = torch.rand(t.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (t.detach().double() * (1 + move * torch.finfo(dtype).eps)).to(dtype)


def execute(
    program: Program,
    dtype: torch.dtype,
    incoming: list[torch.Tensor] | None,
    weft_runs: bool = False,
    neighbour: int | None = None,
) -> Outcome:
    """Runs the program by weft or by plain.py. Values have the program's dtype; the computation is in `dtype`."""
    given = {name: g.leaf(nearby(g.values, program.dtype, neighbour)) for name, g in program.caller_tensors.items()}
    leaves = {
        name: (t.to(dtype) if t.is_floating_point() else t).requires_grad_(program.caller_tensors[name].requires_grad)
        for name, t in given.items()
    }
    params = program.parameters()
    if weft_runs:
        param_copies = {id(p): p for p in params}
        run = by_weft(program)
    else:
        param_copies = {id(p): nearby(p, program.dtype, neighbour).to(dtype, copy=True) for p in params}
        for p in params:
            param_copies[id(p)].requires_grad_(p.requires_grad)
        run = by_plain(lambda p: param_copies[id(p)])
    held = {**leaves, **{f"parameter {i}": param_copies[id(p)] for i, p in enumerate(params)}}
    for t in held.values():
        t.grad = None
    count = 0 if incoming is None else 1 + program.twice
    passes = [[g.to(dtype, copy=True) for g in incoming] for _ in range(count)]
    caller = dict(held)
    for k, grads in enumerate(passes):
        caller |= {f"incoming gradient {i} of pass {k}": g for i, g in enumerate(grads)}
    before = {name: (t.detach().clone(), t._version) for name, t in caller.items()}

    outcome = Outcome([], {})
    if program.warm_up and weft_runs:
        with torch.no_grad():
            outcome.warm = [t.clone() for t in forward(program, run, leaves)]
    with torch.set_grad_enabled(not program.no_grad):
        outcome.outputs = forward(program, run, leaves)
    values = [t.detach().clone() for t in outcome.outputs]
    for i, incoming in enumerate(passes):
        tensors, grads = targets(program, outcome.outputs, incoming)
        if tensors:
            torch.autograd.backward(tensors, grads, retain_graph=i + 1 < len(passes))
        for t in held.values():  # torch may keep an incoming gradient as .grad, to which the next pass would add
            t.grad = None if t.grad is None else t.grad.clone()
    for name, (value, version) in before.items():
        if not torch.equal(caller[name].detach(), value) or caller[name]._version != version:
            outcome.changed.append(name)
    for i, value in enumerate(values):
        if not torch.equal(outcome.outputs[i].detach(), value):
            outcome.changed.append(f"output {i}, by backward")
    outcome.grads = {name: t.grad for name, t in held.items()}
    return outcome


# ---- comparing ----------------------------------------------------------------------------------------------------


NEIGHBOURS = 16


def incoming_gradients(program: Program, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(program.seed)
    grads = [(torch.rand(t.shape, generator=generator) * 2 - 1).to(program.dtype) for t in outputs]
    strided = program.seed % 4 == 0
    return [g.transpose(0, -1).contiguous().transpose(0, -1) if strided and g.dim() > 1 else g for g in grads]


def find_errors(program: Program) -> list[str]:
    """Returns the errors of weft in this program."""
    shapes = execute(program, torch.float64, None).outputs
    incoming = None if program.no_grad else incoming_gradients(program, shapes)
    mine = execute(program, program.dtype, incoming, weft_runs=True)
    exact = execute(program, torch.float64, incoming)
    eager = execute(program, program.dtype, incoming)

    found = [f"{name} was changed" for name in mine.changed]
    if len(mine.outputs) != len(exact.outputs):
        return [*found, f"{len(mine.outputs)} outputs, expected {len(exact.outputs)}"]
    for i, (a, b) in enumerate(zip(mine.outputs, eager.outputs, strict=True)):
        if a.requires_grad != b.requires_grad:
            found.append(f"output {i} has requires_grad={a.requires_grad}, in torch {b.requires_grad}")
    for i, warm in enumerate(mine.warm):
        if not torch.equal(warm, mine.outputs[i].detach()):
            found.append(f"output {i} differs from that of a call without gradients")
    for name, truth in exact.grads.items():
        if truth is None and mine.grads[name] is not None and mine.grads[name].count_nonzero():
            found.append(f"gradient of {name} is {mine.grads[name]}, torch has none")
        if truth is not None and mine.grads[name] is None:
            found.append(f"gradient of {name} is missing")
    for what, a, b in ((w, t, eager.tensors()[w]) for w, t in mine.tensors().items() if w in eager.tensors()):
        if a.dtype != b.dtype or a.shape != b.shape:
            return [*found, f"{what} is {a.dtype} {tuple(a.shape)}, in torch {b.dtype} {tuple(b.shape)}"]
    return found + tolerance_errors(
        program, incoming, errors(mine, exact), max(errors(eager, exact).values(), default=0.0)
    )


def errors(outcome: Outcome, exact: Outcome) -> dict[str, float]:
    """Returns the error of each output and gradient, relative to its largest value. Gradients that nearly cancel are
    compared with the largest gradient, and none with less than 2.5e-4 (float16 has few bits below)."""
    got, relative = outcome.tensors(), {}
    largest = max((top(g) for g in exact.grads.values() if g is not None), default=0.0)
    for what, truth in exact.tensors().items():
        if what in got:
            floor = 1e-2 * largest if what.startswith("gradient") else 0.0
            relative[what] = distance(got[what], truth) / max(top(truth), floor, 2.5e-4)
    return relative


def top(t: torch.Tensor) -> float:
    return t.detach().abs().max().item() if t.numel() else 0.0


def tolerance_errors(program: Program, incoming, mine: dict[str, float], eager: float) -> list[str]:
    """Compares with the tolerances. Eager's error may be small by chance for these values, so it is also measured for
    neighbours, in which each input differs by one rounding."""
    if max(mine.values(), default=0.0) <= allowed_in_a_pipeline(program.dtype, eager):
        return []
    for k in range(NEIGHBOURS if program.dtype != torch.float64 else 0):
        exact = execute(program, torch.float64, incoming, neighbour=k)
        eager = max(eager, *errors(execute(program, program.dtype, incoming, neighbour=k), exact).values())
    allowed = allowed_in_a_pipeline(program.dtype, eager)
    return [
        f"{what} has error {error:.3g}, allowed {allowed:.3g}, eager's largest is {eager:.3g}"
        for what, error in mine.items()
        if error > allowed
    ]


def describe(program: Program) -> str:
    """Describes the program, to reproduce a failure: `pipelines.find_errors(pipelines.generate(seed))`."""
    flags = [f for f in ("fuse_nested", "by_hand", "no_grad", "warm_up", "twice") if getattr(program, f)]
    frozen = {id(p) for p in program.parameters() if not p.requires_grad}
    lines = [f"seed {program.seed}: {program.dtype} {' '.join(flags)}; loss: {program.loss} of outputs {program.used}"]
    for name, g in program.caller_tensors.items():
        lines.append(f"  {name}: {tuple(g.values.shape)} {g.layout}{' requires grad' if g.requires_grad else ''}")

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
            text += " eval" if isinstance(node.module, ops.Dropout) and not node.module.training else ""
            lines.append(f"{indent}{tuple(node.shape)} {text} {node.note}".rstrip())

    for i, part in enumerate(program.parts):
        lines.append(f"  Sequential {i} of {'x' if i == 0 else program.second_input}:")
        show(part, "    ")
    return "\n".join(lines)
