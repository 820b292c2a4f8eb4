"""Runs and judges random pipelines (`pipelines.py`).

A program runs in weft, in float64 by plain.py (the reference), and in weft's dtype by plain.py (eager). A quantized
linear of the reference multiplies the operands that weft quantized (`quantized_operands.py`). Then weft runs it in its
second way: under activation checkpointing, in threads, compiled, or only once more. `judge` lists the errors of weft:

- a value: an output, a gradient, or an operand before quantization is farther from float64 than the rule permits;
- a code, a scale or a maximum of a quantized operand differs from quantization_reference.py;
- torch's generator is not in the state in which plain torch leaves it, with and without gradients, or dropped values
  are others than those that plain torch draws;
- the second way gives other bits. Compiled, and where gradients of a shared Parameter are added in another order, the
  rule for values applies instead;
- a tensor of the caller was changed, an output requires a gradient or not, a gradient is missing, a dtype or a shape.

The rule for values, written before the long runs. Errors are relative to the largest value of the tensor; of gradients
also to 1/100 of the largest gradient, those of the outputs in the loss included. T is the tolerance of a pipeline
(tolerances.py).

1. An error of at most T is right.
2. Otherwise up to 64 neighbours run, whose inputs and Parameters differ by up to one rounding of weft's dtype. In
   eager what an operation computes, and the gradient that it receives, differ by up to one rounding, too: as if it had
   rounded at other places. They have the quantized operands of the program, so eager's products of these differ by up
   to one rounding of float32 of the sum of magnitudes, as if it were added in another order. E is the largest error of
   eager in the program and its neighbours. In float64, where eager is the reference, E is the largest difference
   between the reference's results of the program and of its neighbours.
3. The program is ill-conditioned if E > T/2. Then an error of at most 2 E (float64: 16 E, for as many roundings of
   intermediate values) is right.
4. Any other error is wrong, and the seed is printed.

A program whose eager error exceeds T/2 counts as ill-conditioned, too, whatever weft's error is. Ill-conditioned
programs are counted, and the seeds of those that step 3 permits are printed. None is skipped, and the rule is only
about values: all other checks apply to them.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import plain
import torch
from pipelines import GRAD_MODES, GRADIENTS, HISTORY, Modes, Node, Program, describe, flat, generate
from quantized_operands import Reference, Trace
from tolerances import TOLERANCES, distance
from torch.utils.checkpoint import checkpoint

import torchweft
from torchweft import fusion, ops
from torchweft._delayed_scaling import state_of

NEIGHBOURS = 64
EAGER_FACTOR, FLOAT64_FACTOR = 2, 16
Tensors = list[torch.Tensor]


# ---- calling the Sequentials --------------------------------------------------------------------------------------


class Weft:
    """Calls the Sequentials of a program."""

    def __init__(self, program: Program, checkpoint: str | None = None, backend: str | None = None) -> None:
        self.program, self.checkpoint = program, checkpoint
        self.taken = [external_inputs(nodes) for nodes in program.parts]
        self.calls = [self._call(i, backend) for i in range(len(program.parts))]

    def _call(self, part: int, backend: str | None) -> Callable:
        nodes, names = self.program.parts[part], self.taken[part]
        if self.program.by_hand:

            def by_hand(x, *extras):
                env = dict(zip(names, extras, strict=True))
                y, outputs = one_by_one(nodes, x, env, lambda node, x, extras: unpack(node.module(x, *extras)))
                return (y, *outputs)

            return by_hand
        module = torchweft.Sequential(*(n.module for n in nodes), fuse_nested=self.program.fuse_nested)
        if backend is None:
            return module
        return torch.compile(module, fullgraph=True, backend=backend, dynamic=self.program.dynamic)

    def run(self, part: int, x: torch.Tensor, env: dict[str, torch.Tensor], modes: Modes) -> tuple:
        extras = [env[name] for name in self.taken[part]]
        choice = modes.recipes[part]

        def region() -> AbstractContextManager:
            return nullcontext() if choice is None else torchweft.autocast(recipe=choice.make())

        def call(*inputs):
            with region():
                return self.calls[part](*inputs)

        if self.checkpoint is None:
            return unpack(call(x, *extras))
        if self.checkpoint == "with contexts":
            with region():
                contexts = torchweft.recompute_contexts
                return unpack(checkpoint(self.calls[part], x, *extras, use_reentrant=False, context_fn=contexts))
        # Without an input that requires a gradient torch's reentrant checkpoint computes none.
        differentiates = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *extras))
        reentrant = self.checkpoint == "reentrant" and differentiates

        def new_tensors(*inputs):
            """A torch.autograd.Function must not return one tensor twice."""
            return tuple(t.view_as(t) for t in as_tuple(call(*inputs)))

        return unpack(checkpoint(new_tensors if reentrant else call, x, *extras, use_reentrant=reentrant))


class Plain:
    """Calls the operations of a program in plain torch."""

    def __init__(self, program: Program, of: plain.Of, reference: Reference) -> None:
        self.program, self.of, self.reference = program, of, reference
        self.moved = 0

    def run(self, part: int, x: torch.Tensor, env: dict[str, torch.Tensor], modes: Modes) -> tuple:
        choice = modes.recipes[part]
        quantizers = None if choice is None else choice.make().quantizers()

        def call(node, x, extras):
            if not isinstance(node.module, ops.FusibleOperation):
                param_copies = {name: self.of(p) for name, p in node.module.named_parameters()}
                return torch.func.functional_call(node.module, param_copies, (x,)), ()
            gemm = plain.plain_gemm
            if quantizers is not None and isinstance(node.module, ops.Linear | ops.BasicLinear | ops.GroupedLinear):
                gemm = self.reference.gemm(node.module, quantizers)
            y, extra = plain.apply(node.module, x, *extras, of=self.of, gemm=gemm)
            return self._moved(y, x), extra

        return one_by_one(self.program.parts[part], x, env, call)


    def _moved(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns y, for a neighbour moved by up to one rounding. The reference rounds nothing, and neither does an
        operation that passes its input on."""
        neighbour = self.reference.neighbour
        if neighbour is None or self.program.dtype == torch.float64 or y.dtype == torch.float64 or not y.numel():
            return y
        if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            return y
        self.moved += 1
        return _Moved.apply(y, neighbour, -self.moved)


class _Moved(torch.autograd.Function):
    """Moves a result, and the gradient that it receives, by up to one rounding."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, neighbour: int, number: int) -> torch.Tensor:
        ctx.neighbour, ctx.number = neighbour, number
        return nearby(y, y.dtype, neighbour, 2 * number)

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        return nearby(dy, dy.dtype, ctx.neighbour, 2 * ctx.number + 1), None, None


def external_inputs(nodes: list[Node]) -> list[str]:
    channels = {n.channel for n in flat(nodes)}
    return [name for n in flat(nodes) for name in n.takes if name not in channels]


def as_tuple(result) -> tuple:
    return result if isinstance(result, tuple) else (result,)


def unpack(result):
    y, *outputs = as_tuple(result)
    return y, outputs


def one_by_one(nodes, x, env, call):
    env, outputs = dict(env), []
    for node in flat(nodes):
        x, extra = call(node, x, [env[name] for name in node.takes])
        if node.channel is not None:
            env[node.channel] = extra[0]
        if node.public:
            outputs.append(extra[0])
    return x, outputs


@contextmanager
def grad_mode(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for enter in GRAD_MODES[name]:
            stack.enter_context(enter())
        yield


def rules(program: Program) -> AbstractContextManager:
    if program.rules == "none":
        return fusion.without_rules()
    return fusion.with_rules("norm_linear") if program.rules == "with norm_linear" else nullcontext()


def forward(program: Program, caller: Weft | Plain, leaves: dict[str, torch.Tensor], modes: Modes) -> Tensors:
    """Returns [output, extra outputs…, output of the first Sequential if there are two]."""
    env = {name: given.view(leaves[name]) for name, given in program.caller_tensors.items()}

    def run(part: int, x: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        mode = modes.grad_modes[part]
        with grad_mode(mode):
            y, outputs = caller.run(part, x, env, modes)
        # Without gradients an eager call returns an input that it passes on, but a compiled one a copy that requires no
        # gradient. This makes them comparable.
        compared = program.backend is not None and mode not in GRADIENTS
        return (y.detach(), [t.detach() for t in outputs]) if compared else (y, outputs)

    y, outputs = run(0, env["x"])
    if len(program.parts) == 1:
        return [y, *outputs]
    env |= {f"first.{i}": t for i, t in enumerate(outputs)}
    env["first"] = y
    last, more = run(1, env[program.second_input])
    return [last, *outputs, *more, y]


def without_gradients(modes: Modes) -> Modes:
    return Modes(modes.recipes, ("no_grad",) * len(modes.grad_modes))


# ---- one run ------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    outputs: Tensors
    incoming: Tensors  # gradients of the outputs
    grads: dict[str, torch.Tensor | None] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    used: list[int] = field(default_factory=list)  # outputs in the loss
    generator: bytes = b""  # state of torch's generator after the call
    states: Tensors = field(default_factory=list)  # of delayed scaling, after backward
    trace: Trace = field(default_factory=Trace)

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {f"output {i}": t for i, t in enumerate(self.outputs)} | self.trace.tensors
        return named | {f"gradient of {name}": g for name, g in self.grads.items() if g is not None}


def used_outputs(program: Program, outputs: Tensors) -> list[int]:
    """Returns the outputs in the loss. A view that was made without gradients of a leaf that requires one requires one,
    too, but torch cannot differentiate it."""

    def differentiable(t: torch.Tensor) -> bool:
        return t.requires_grad and (t.grad_fn is not None or not t._is_view())

    return [i for i in program.used if differentiable(outputs[i])]


def targets(program: Program, outputs: Tensors, incoming: Tensors, used: list[int]):
    """Returns (tensors, their gradients) for torch.autograd.backward."""
    if program.loss == "sum":
        return ([sum(outputs[i].sum() for i in used)], [None]) if used else ([], [])
    by_shape: dict[tuple, list[int]] = {}
    for i in used:
        by_shape.setdefault((tuple(outputs[i].shape), outputs[i].dtype), []).append(i)
    groups = list(by_shape.values())
    if program.loss == "pairs":  # a sum passes the same gradient to all its terms
        return [sum(outputs[i] for i in group) for group in groups], [incoming[group[0]] for group in groups]
    if program.loss == "one gradient":
        return [outputs[i] for group in groups for i in group], [incoming[g[0]] for g in groups for _ in g]
    return [outputs[i] for i in used], [incoming[i] for i in used]


def incoming_gradients(program: Program, outputs: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(program.seed)
    grads = [(torch.rand(t.shape, generator=generator) * 2 - 1).to(t.dtype) for t in outputs]
    strided = program.seed % 4 == 0
    return [g.transpose(0, -1).contiguous().transpose(0, -1) if strided and g.dim() > 1 else g for g in grads]


def nearby(t: torch.Tensor, dtype: torch.dtype, neighbour: int | None, number: int) -> torch.Tensor:
    """Returns t, the tensor of this number, in `dtype`; for a neighbour each value is moved by up to one rounding, and
    those of no two tensors alike. Integers do not change."""
    if not t.is_floating_point():
        return t
    if neighbour is None:
        return t.detach().to(dtype)
    generator = torch.Generator().manual_seed((neighbour + NEIGHBOURS * number) % 2**63)
    move = torch.rand(t.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return (t.detach().double() * (1 + move * torch.finfo(dtype).eps)).to(dtype)


def new_leaves(program: Program, dtype: torch.dtype, neighbour: int | None = None) -> dict[str, torch.Tensor]:
    """Returns new leaves. Values have the program's dtype; the computation is in `dtype`."""
    leaves = {}
    for number, (name, given) in enumerate(program.caller_tensors.items()):
        leaf = given.leaf(nearby(given.values, program.dtype, neighbour, number))
        leaves[name] = (leaf.to(dtype) if leaf.is_floating_point() else leaf).requires_grad_(given.requires_grad)
    return leaves


def linears(program: Program) -> list[torch.nn.Module]:
    modules = {id(m): m for m in program.modules() if isinstance(m, ops.Linear | ops.BasicLinear)}
    return list(modules.values())


def draw_states(program: Program) -> dict[int, Tensors]:
    """Gives each linear new scales and maxima of delayed scaling. Returns them by the address of the weight."""
    if not program.delayed():
        return {}
    generator, states = torch.Generator().manual_seed(program.seed), {}
    for module in linears(program):
        module.__dict__.pop("_delayed_scaling", None)
        operation = module._stages()[0]
        operation.__dict__.pop("_delayed_scaling", None)
        parts = state_of(operation, HISTORY)
        for part in parts:
            part[0] = 2.0 ** torch.randint(-2, 7, part[0].shape, generator=generator)
            part[2:] = torch.rand(part[2:].shape, generator=generator)
        states[module.weight.data_ptr()] = parts
    return states


def run_weft(program: Program, caller: Weft, of: Outcome | None = None) -> Outcome:
    """Runs the program, forward and backward; `of` is its first outcome."""
    states = draw_states(program)
    with ExitStack() as stack:
        trace = Trace()
        if caller.checkpoint is None and any(program.modes.recipes):
            stack.enter_context(trace.observe(states))
        params = {id(p): p for p in program.parameters()}
        leaves = new_leaves(program, program.dtype)
        outcome = _run(program, caller, leaves, params, program.modes, trace, None, of)
    outcome.states = [part.clone() for parts in states.values() for part in parts]
    return outcome


def run_plain(
    program: Program, dtype: torch.dtype, mine: Outcome, neighbour: int | None = None, checks: bool = False
) -> Outcome:
    """Runs the program in plain torch, for the gradients and the quantized operands of weft's outcome."""
    params = {}
    for number, p in enumerate(program.parameters(), start=len(program.caller_tensors)):
        moved = nearby(p, program.dtype, neighbour, number)
        params[id(p)] = moved.to(dtype, copy=True).requires_grad_(p.requires_grad)
    reference = Reference(weft=mine.trace, checks=checks, neighbour=neighbour)
    caller = Plain(program, lambda p: params[id(p)], reference)
    leaves = new_leaves(program, dtype, neighbour)
    incoming = [g.to(dtype if g.dtype == program.dtype else torch.promote_types(g.dtype, dtype)) for g in mine.incoming]
    return _run(program, caller, leaves, params, program.modes, reference, incoming, mine)


def _run(program, caller, leaves, params, modes, trace, incoming, of: Outcome | None = None) -> Outcome:
    """`of`: an outcome of the program, in whose loss are no other outputs."""
    held = {**leaves, **{f"parameter {i}": p for i, p in enumerate(params.values())}}
    for t in held.values():
        t.grad = None
    before = {name: (t.detach().clone(), t._version) for name, t in held.items()}
    torch.default_generator.manual_seed(program.seed)
    outputs = forward(program, caller, leaves, modes)
    generator = torch.get_rng_state().numpy().tobytes()
    incoming = incoming_gradients(program, outputs) if incoming is None else incoming
    used = [i for i in used_outputs(program, outputs) if of is None or i in of.used]
    outcome = Outcome(outputs, incoming, used=used, generator=generator, trace=trace)
    values = [t.detach().clone() for t in outputs]
    count = 1 + program.twice
    caller_tensors = dict(held)
    for trace.number in range(count):
        grads = [g.clone() for g in incoming]
        given = {f"incoming gradient {i} of pass {trace.number}": g for i, g in enumerate(grads)}
        caller_tensors |= given
        before |= {name: (g.clone(), g._version) for name, g in given.items()}
        tensors, grads = targets(program, outputs, grads, used)
        if tensors:
            torch.autograd.backward(tensors, grads, retain_graph=trace.number + 1 < count)
        for t in held.values():  # torch may keep an incoming gradient as .grad, to which the next pass would add
            t.grad = None if t.grad is None else t.grad.clone()
    for name, (value, version) in before.items():
        if not same(caller_tensors[name].detach(), value) or caller_tensors[name]._version != version:
            outcome.changed.append(name)
    for i, value in enumerate(values):
        if not same(outputs[i].detach(), value):
            outcome.changed.append(f"output {i}, by backward")
    outcome.grads = {name: t.grad for name, t in held.items()}
    return outcome


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all values are equal; NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


# ---- judging ------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    errors: list[str] = field(default_factory=list)
    ill_conditioned: bool = False
    above_tolerance: bool = False  # right by step 3 of the rule


def judge(program: Program) -> Verdict:
    verdict = Verdict()
    with rules(program), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            mine = judge_call(program, verdict)
            if program.threads:
                verdict.errors += threads_errors(program, mine)
            if program.checkpoint is not None or not (program.threads or program.backend):
                other = run_weft(program, Weft(program, program.checkpoint), mine)
                verdict.errors += differences(program, mine, other, program.checkpoint or "once more")
            if program.backend is not None:
                judge_compiled(program, verdict, mine)
        except Exception as error:  # noqa: BLE001 - an exception is an error of the program
            verdict.errors.append(f"{type(error).__name__}: {error}")
    return verdict


def find_errors(program: Program) -> list[str]:
    """Returns the errors of weft in this program."""
    return judge(program).errors


def judge_call(program: Program, verdict: Verdict) -> Outcome:
    """Judges a call that is neither checkpointed, compiled, nor in threads."""
    caller = Weft(program)
    mine = run_weft(program, caller)
    if program.warm_up:
        verdict.errors += no_grad_errors(program, caller, mine)
    judge_against_plain(program, mine, verdict)
    return mine


def no_grad_errors(program: Program, caller: Weft, mine: Outcome) -> list[str]:
    """Compares a call without gradients."""
    draw_states(program)
    torch.default_generator.manual_seed(program.seed)
    outputs = forward(program, caller, new_leaves(program, program.dtype), without_gradients(program.modes))
    found = []
    if torch.get_rng_state().numpy().tobytes() != mine.generator:
        found.append("torch's generator is in another state after a call without gradients")
    for i, (a, b) in enumerate(zip(outputs, mine.outputs, strict=True)):
        if not program.delayed() and not same(a, b.detach()):  # which updates its scales with gradients only
            found.append(f"output {i} differs from that of a call without gradients")
    return found


def judge_against_plain(program: Program, mine: Outcome, verdict: Verdict) -> None:
    exact = run_plain(program, torch.float64, mine, checks=True)
    eager = run_plain(program, program.dtype, mine)
    found = verdict.errors
    found += [f"{name} was changed" for name in mine.changed]
    if len(mine.outputs) != len(exact.outputs):
        found.append(f"{len(mine.outputs)} outputs, expected {len(exact.outputs)}")
        return
    for i, (a, b) in enumerate(zip(mine.outputs, eager.outputs, strict=True)):
        if a.requires_grad != b.requires_grad:
            found.append(f"output {i} has requires_grad={a.requires_grad}, in torch {b.requires_grad}")
    if mine.generator != exact.generator:
        found.append("torch's generator is in another state than after plain torch")
    found += exact.trace.wrong
    if exact.trace.count != len(mine.trace.linears):
        found.append(f"{len(mine.trace.linears)} linears were quantized, expected {exact.trace.count}")
    for name, truth in exact.grads.items():
        if truth is None and mine.grads[name] is not None and mine.grads[name].count_nonzero():
            found.append(f"gradient of {name} is {mine.grads[name]}, torch has none")
        if truth is not None and mine.grads[name] is None and truth.count_nonzero():
            found.append(f"gradient of {name} is missing")
    for what, a, b in ((w, t, eager.tensors()[w]) for w, t in mine.tensors().items() if w in eager.tensors()):
        if a.dtype != b.dtype or a.shape != b.shape:
            found.append(f"{what} is {a.dtype} {tuple(a.shape)}, in torch {b.dtype} {tuple(b.shape)}")
            return
    judge_values(program, mine, exact, eager, verdict)


def errors(outcome: Outcome, exact: Outcome) -> dict[str, float]:
    """Returns the error of each output and gradient, relative to its largest value. Gradients that nearly cancel are
    compared with the largest gradient (with one key those of queries are 0 in exact arithmetic, so that of the output
    counts), and none with less than 2.5e-4 (float16 has few bits below)."""
    got, relative = outcome.tensors(), {}
    given = [exact.incoming[i] for i in exact.used]
    largest = max((top(g) for g in [*exact.grads.values(), *given] if g is not None), default=0.0)
    for what, truth in exact.tensors().items():
        if what in got:
            floor = 1e-2 * largest if what.startswith("gradient") else 0.0
            relative[what] = distance(got[what], truth) / max(top(truth), floor, 2.5e-4)
    return relative


def top(t: torch.Tensor) -> float:
    return t.detach().abs().max().item() if t.numel() else 0.0


def judge_values(program: Program, mine: Outcome, exact: Outcome, eager: Outcome, verdict: Verdict) -> None:
    """The rule for values."""
    tolerance, wide = TOLERANCES[program.dtype].pipeline, program.dtype == torch.float64
    found, condition = errors(mine, exact), max(errors(eager, exact).values(), default=0.0)
    worst = max(found.values(), default=0.0)
    factor = FLOAT64_FACTOR if wide else EAGER_FACTOR

    def allowed() -> float:
        return max(tolerance, factor * condition) if condition > tolerance / 2 else tolerance

    for k in range(NEIGHBOURS):
        if worst <= allowed():
            break
        moved = run_plain(program, torch.float64, mine, neighbour=k)
        other = exact if wide else run_plain(program, program.dtype, mine, neighbour=k)
        condition = max(condition, *errors(other, moved).values())
    verdict.ill_conditioned |= condition > tolerance / 2
    verdict.above_tolerance |= tolerance < worst <= allowed()
    verdict.errors += [
        f"{what} has error {error:.3g}, allowed {allowed():.3g} (E = {condition:.3g}, T = {tolerance:.3g})"
        for what, error in found.items()
        if error > allowed()
    ]


def differences(program: Program, mine: Outcome, other: Outcome, way: str) -> list[str]:
    """Compares another call of the program with the first one, bit by bit."""
    found = [f"{way}: {name} was changed" for name in other.changed]
    if len(other.outputs) != len(mine.outputs):
        return [*found, f"{way}: {len(other.outputs)} outputs, expected {len(mine.outputs)}"]
    if other.generator != mine.generator:
        found.append(f"{way}: torch's generator is in another state")
    for i, (a, b) in enumerate(zip(mine.outputs, other.outputs, strict=True)):
        if not same(a.detach(), b.detach()):
            found.append(f"{way}: output {i} has other bits")
        if a.requires_grad != b.requires_grad and not (way == "reentrant" and b.requires_grad):
            found.append(f"{way}: output {i} has requires_grad={b.requires_grad}")
    rounded = way == "reentrant" and reentrant_rounds_otherwise(program, mine)
    for name, a in mine.grads.items():
        b = other.grads[name]
        if a is None or b is None:
            equal = all(t is None or not t.count_nonzero() for t in (a, b))
        elif rounded:
            equal = distance(b, a.double()) <= TOLERANCES[program.dtype].pipeline * max(top(a), 2.5e-4)
        else:
            equal = same(a, b)
        if not equal:
            found.append(f"{way}: gradient of {name} has other bits")
    if not all(map(same, mine.states, other.states)):
        found.append(f"{way}: the scales or maxima of delayed scaling differ")
    return found


def reentrant_rounds_otherwise(program: Program, mine: Outcome) -> bool:
    """Whether torch's reentrant checkpoint, which runs a backward of its own for each Sequential, adds more than two
    gradients of one tensor in another order, or adds zeros to a gradient, which changes its layout."""
    uses = Counter(p for m in program.modules() for p in m.parameters())
    uses.update(["x", *("x" for _ in program.parts[1:] if program.second_input == "x")])
    uses.update(name for part in program.parts for name in external_inputs(part))
    uses.update(name for name in list(uses) if isinstance(name, str) and name.startswith("first"))  # the loss
    return program.twice or max(uses.values()) > 2 or len(mine.used) < len(mine.outputs)


# ---- threads ------------------------------------------------------------------------------------------------------


def threads_errors(program: Program, mine: Outcome) -> list[str]:
    """Calls the modules in threads at once, each with its recipes and grad modes, and compares bit by bit."""
    caller = Weft(program, program.checkpoint)
    expected = [results(program, caller, modes, mine.incoming) for modes in program.threads]
    barrier, found = threading.Barrier(len(program.threads)), []

    def work(i: int) -> None:
        try:
            for _ in range(2):
                barrier.wait(60)
                got = results(program, caller, program.threads[i], mine.incoming)
                if not all(map(equal_or_missing, got, expected[i])):
                    found.append(f"thread {i} got other bits than without threads")
        except Exception as error:  # noqa: BLE001
            barrier.abort()
            found.append(f"thread {i}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(program.threads))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not all(map(same, expected[0], (t.detach() for t in mine.outputs))):
        found.append("a second call without threads has other outputs")
    return sorted(set(found))


def equal_or_missing(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else same(a, b)


def results(program: Program, caller: Weft, modes: Modes, incoming: Tensors) -> list[torch.Tensor | None]:
    """Returns outputs and gradients, and changes nothing."""
    leaves = new_leaves(program, program.dtype)
    outputs = forward(program, caller, leaves, modes)
    tensors, grads = targets(program, outputs, incoming, used_outputs(program, outputs))
    held = [t for t in (*leaves.values(), *program.parameters()) if t.requires_grad]
    found = torch.autograd.grad(tensors, held, grads, allow_unused=True) if tensors and held else ()
    return [*(t.detach() for t in outputs), *found]


# ---- compiled -----------------------------------------------------------------------------------------------------


def judge_compiled(program: Program, verdict: Verdict, mine: Outcome) -> None:
    """Compares a compiled call with the first one: bit by bit, or else both with plain torch."""
    import torch._functorch.config as functorch  # slow

    torch._dynamo.reset()
    try:
        with functorch.patch(donated_buffer=not program.twice):  # which a second backward cannot have
            other = run_weft(program, Weft(program, program.checkpoint, program.backend), mine)
            if not differences(program, mine, other, "compiled"):
                return
            if program.checkpoint is not None:  # whose operands are not recorded
                other = run_weft(program, Weft(program, None, program.backend), mine)
    finally:
        torch._dynamo.reset()
    compiled = Verdict()
    judge_against_plain(program, other, compiled)
    verdict.ill_conditioned |= compiled.ill_conditioned
    verdict.above_tolerance |= compiled.above_tolerance
    verdict.errors += [f"compiled: {error}" for error in compiled.errors]


# ---- many -----------------------------------------------------------------------------------------------------------


@dataclass
class Summary:
    """What a series of pipelines found."""

    count: int = 0
    ill_conditioned: int = 0
    above_tolerance: list[int] = field(default_factory=list)  # seeds of ill-conditioned ones that step 3 permits
    wrong: list[int] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        def seeds(found: list[int]) -> str:
            return f" (seeds {', '.join(map(str, found[:100]))}{', …' * (len(found) > 100)})" if found else ""

        wrong = f"{len(self.wrong)} wrong{seeds(self.wrong)}"
        above = f"{len(self.above_tolerance)} right by step 3{seeds(self.above_tolerance)}"
        return f"{self.count} pipelines, {self.ill_conditioned} ill-conditioned, {wrong}; {above}"


def run_seeds(seeds: Iterable[int], compiled: bool = False) -> Summary:
    summary = Summary()
    for seed in seeds:
        program = generate(seed, compiled)
        verdict = judge(program)
        summary.count += 1
        summary.ill_conditioned += verdict.ill_conditioned
        summary.above_tolerance += [seed] * (verdict.above_tolerance and not verdict.errors)
        if verdict.errors:
            summary.wrong.append(seed)
            if len(summary.reports) < 20:
                summary.reports.append("\n".join([describe(program), *(f"  ! {line}" for line in verdict.errors)]))
    return summary
