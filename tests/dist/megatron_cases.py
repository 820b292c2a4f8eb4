"""Cases that a rank of test_megatron.py runs.

`same` writes its results on one rank, and compares with them on more. `train` saves a checkpoint during training,
`resume` continues from it on another number of ranks. `recipes` trains with FP8. `limits` runs what is not compared,
and unsupported features.
"""

import itertools
import os
import re
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from launch import PACKAGES

sys.path[:0] = PACKAGES
warnings.simplefilter("ignore")
import torchweft.te  # noqa: E402

torchweft.te.install()
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.utils import get_batch_on_this_cp_rank  # noqa: E402

ROWS, BATCH, HIDDEN, FFN, VOCAB = 8, 2, 64, 128, 48
QUANTIZED_ROWS = 32  # MXFP8 requires 32 rows per rank
TOLERANCE = 1e-5  # relative
SAVED_AFTER, STEPS = 50, 55

PLAIN = {"normalization": "LayerNorm"}
GATED = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "num_query_groups": 2,
}


def config(sequence: bool, accumulate: bool, layers: int = 1, **more) -> TransformerConfig:
    return TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=4,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        sequence_parallel=sequence,
        gradient_accumulation_fusion=accumulate,
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, **more},
    )


def layer_spec(fuser: bool = False, experts: int | None = None):
    return get_gpt_layer_with_transformer_engine_spec(
        use_te_op_fuser=fuser, num_experts=experts, moe_grouped_gemm=experts is not None
    )


# ---- shards of full Parameters ------------------------------------------------------------------------------------


def shard(whole: torch.Tensor, like: torch.nn.Parameter, name: str, gated: bool) -> torch.Tensor:
    """This rank's shard of a full Parameter or gradient, by Megatron's attributes. A gated fc1 is two matrices."""
    if not getattr(like, "tensor_model_parallel", False):
        return whole
    pieces = whole.chunk(2) if gated and "linear_fc1" in name else (whole,)
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return torch.cat([piece.chunk(ranks, like.partition_dim)[rank] for piece in pieces])


def global_name(name: str, model: torch.nn.Module) -> str:
    """The name of a Parameter on one rank. An expert's number counts the experts of all ranks."""
    found = re.fullmatch(r"(.*\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)", name)
    if found is None:
        return name
    local = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    return found[1] + str(int(found[2]) + parallel_state.get_expert_model_parallel_rank() * local)


def fill(model: torch.nn.Module, gated: bool, whole: dict[str, torch.Tensor]) -> None:
    """Copies the weights from `whole`. On one rank, missing weights are drawn and added to it."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            name = global_name(name, model)
            if name not in whole:
                assert dist.get_world_size() == 1, f"{name} exists only on {dist.get_world_size()} ranks"
                whole[name] = torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.1) + (
                    1.0 if "norm_weight" in name else 0.0
                )
            p.copy_(shard(whole[name], p, name, gated))


def drawn(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def near(got: torch.Tensor, expected: torch.Tensor, scale: float, what: str) -> None:
    error = (got - expected).norm().item()
    assert error <= TOLERANCE * scale, f"{what}: off by {error:.3g} of {scale:.3g}"


# ---- one layer ----------------------------------------------------------------------------------------------------


def layer_step(options: dict, fuser: bool, sequence: bool, accumulate: bool, whole: dict) -> dict:
    """Loss, gradients of this rank's Parameters and the gradient norm over all ranks, for one call of a layer."""
    spec = layer_spec(fuser)
    layer = build_module(spec, config=config(sequence, accumulate, **options), layer_number=1)
    assert type(layer.mlp).__name__ == ("TEFusedMLP" if fuser else "MLP")
    torch.manual_seed(3)
    fill(layer, "gated_linear_unit" in options, whole)
    for p in layer.parameters() if accumulate else ():
        p.main_grad, p.grad_added_to_main_grad = torch.zeros_like(p), False
    x, dy = torch.randn(2, ROWS, BATCH, HIDDEN, generator=drawn(4))
    if sequence:
        x, dy = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in (x, dy))
    y, _ = layer(x.requires_grad_(), attention_mask=None)
    loss = (y * dy).sum()
    loss.backward()
    if sequence:
        dist.all_reduce(loss.detach_())
    return {"loss": loss.item(), **gradients(layer)}


def gradients(model: torch.nn.Module) -> dict:
    """Gradients as Megatron finalizes them: those of sequence-parallel Parameters are summed over the ranks."""
    found, squares = {}, torch.zeros(2)  # of sharded Parameters, of replicated Parameters
    for name, p in model.named_parameters():
        added = getattr(p, "grad_added_to_main_grad", False)
        found[name] = (p.main_grad if added else p.grad).clone()
        if getattr(p, "sequence_parallel", False):
            dist.all_reduce(found[name])
        squares[0 if getattr(p, "tensor_model_parallel", False) else 1] += found[name].square().sum()
    dist.all_reduce(squares[:1])
    return {"norm": squares.sum().sqrt().item(), "gradients": found, "parameters": dict(model.named_parameters())}


def check_layers(known: dict) -> None:
    one = dist.get_world_size() == 1
    for kind, options in {"plain": PLAIN, "gated": GATED}.items():
        whole = known.setdefault(kind + " weights", {})
        for sequence, fuser, accumulate in itertools.product((False,) if one else (False, True), *[(False, True)] * 2):
            got = layer_step(options, fuser, sequence, accumulate, whole)
            # The op fuser uses the tanh GELU, Megatron the exact one: each has its own one-rank result.
            expected = known.setdefault((kind, fuser), {key: got[key] for key in ("loss", "norm", "gradients")})
            what = f"layer {kind} fuser={fuser} sequence={sequence} accumulate={accumulate}"
            compare(got, expected, what)
            for name, p in got["parameters"].items():
                near(
                    got["gradients"][name],
                    shard(expected["gradients"][name], p, name, kind == "gated"),
                    expected["norm"],
                    f"{what} {name}",
                )


def compare(got: dict, expected: dict, what: str, tolerance: float = TOLERANCE) -> None:
    off = {key: abs(got[key] / expected[key] - 1) for key in ("loss", "norm")}
    print(f"{what}: loss off by {off['loss']:.1e}, norm by {off['norm']:.1e}", flush=True)
    assert max(off.values()) <= tolerance, (got["loss"], expected["loss"], got["norm"], expected["norm"])


# ---- a GPT model ----------------------------------------------------------------------------------------------------


class Trainer:
    """GPTModel in Megatron's DistributedDataParallel with Megatron's optimizer. A step has two microbatches, which
    data-parallel ranks share."""

    def __init__(
        self,
        sequence: bool,
        fuser: bool,
        accumulate: bool,
        whole: dict | None = None,
        shared: dict | None = None,
        lr: float = 1e-2,
        wrapper: type = DistributedDataParallel,
        rows: int = ROWS,
        **more,
    ):
        """`whole`: weights; `shared`: options of DDP and optimizer; `more`: options of the model."""
        self.rows = rows
        spec = layer_spec(fuser, more.get("num_moe_experts"))
        settings = config(sequence, accumulate, layers=2, **GATED, **more)
        model = GPTModel(settings, spec, VOCAB, max_sequence_length=rows, position_embedding_type="rope")
        torch.manual_seed(5)
        if whole is not None:
            fill(model, True, whole)
        if wrapper is DistributedDataParallel:  # FSDP2 has reduced the gradients
            settings.finalize_model_grads_func = finalize_model_grads
        shared = shared or {}
        self.model = wrapper(settings, DistributedDataParallelConfig(**shared), model)
        shared = {name: value for name, value in shared.items() if "optimizer" in name}
        dtype = {"bf16": settings.bf16, "params_dtype": settings.params_dtype}
        settings = OptimizerConfig(optimizer="adam", lr=lr, clip_grad=1.0, **dtype, **shared)
        self.optimizer = get_megatron_optimizer(settings, [self.model])

    def step(self, number: int) -> tuple[float, float]:
        """Loss and gradient norm of a step. Its data depends only on its number."""
        first = torch.randint(0, VOCAB, (2, BATCH, 1), generator=drawn(number))
        tokens = (first + 5 * torch.arange(self.rows + 1)) % VOCAB  # the next token can be learned
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        tokens = tokens.chunk(ranks)[rank]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self.forward,
            data_iterator=iter(tokens),
            model=[self.model],
            num_microbatches=len(tokens),
            seq_length=self.rows,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        loss = torch.stack([part["loss"] for part in losses]).mean()
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return loss.item() / parallel_state.get_data_parallel_world_size(with_context_parallel=True), float(norm)

    @staticmethod
    def forward(data, model):
        tokens = next(data)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        batch["positions"] = torch.arange(tokens.size(1) - 1).expand_as(batch["tokens"])
        batch = get_batch_on_this_cp_rank({name: t.contiguous() for name, t in batch.items()})
        losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
        ranks = parallel_state.get_context_parallel_world_size()  # Megatron sums the gradients of their losses
        return losses, lambda given: (given.mean() / ranks, {"loss": given.detach().mean()})

    def state(self, loading: bool = False, optimizer_format: str = "fully_sharded_model_space") -> dict:
        metadata = {
            "distrib_optim_sharding_type": optimizer_format,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = self.model.module.sharded_state_dict(metadata=metadata)
        return {
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata),
        }

    def save(self, folder: Path, **options) -> None:
        folder.mkdir(exist_ok=True)
        dist_checkpointing.save(self.state(**options), str(folder))

    def load(self, folder: Path, **options) -> None:
        loaded = dist_checkpointing.load(self.state(loading=True, **options), str(folder))
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])


# options that must not change the result
VARIANTS = {
    "full recomputation": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective recomputation": {"recompute_granularity": "selective"},
    "fused RoPE": {"apply_rope_fusion": True},
    "distributed optimizer": {"shared": {"use_distributed_optimizer": True}},
    "overlapped gradient reduction": {"shared": {"overlap_grad_reduce": True}},
    "fused cross entropy": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
}


def check_models(known: dict) -> None:
    one = dist.get_world_size() == 1
    whole = known.setdefault("model weights", {})
    for sequence, fuser, accumulate in itertools.product((False,) if one else (False, True), *[(False, True)] * 2):
        loss, norm = Trainer(sequence, fuser, accumulate, whole).step(0)
        got = {"loss": loss, "norm": norm}
        compare(got, known.setdefault("model", got), f"model fuser={fuser} sequence={sequence} accumulate={accumulate}")
    for what, options in VARIANTS.items():
        loss, norm = Trainer(not one, True, True, whole, **options).step(0)
        compare({"loss": loss, "norm": norm}, known["model"], what)


# ---- cases ----------------------------------------------------------------------------------------------------------


def same(folder: Path) -> None:
    file, one = folder / "one_rank.pt", dist.get_world_size() == 1
    known = {} if one else torch.load(file)
    check_layers(known)
    check_models(known)
    if one:
        torch.save(known, file)


def train(folder: Path) -> None:
    trainer = Trainer(sequence=True, fuser=True, accumulate=True)
    losses = []
    for number in range(STEPS):
        if number == SAVED_AFTER:
            trainer.save(folder / "checkpoint")
        losses.append(trainer.step(number)[0])
    if dist.get_rank() == 0:
        torch.save(losses, folder / "losses.pt")
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
        assert losses[-1] < losses[0] / 2


def resume(folder: Path) -> None:
    trainer = Trainer(sequence=False, fuser=True, accumulate=True)
    trainer.load(folder / "checkpoint")
    for number, expected in list(enumerate(torch.load(folder / "losses.pt")))[SAVED_AFTER:]:
        loss, _ = trainer.step(number)
        print(f"step {number}: loss {loss:.6f}, uninterrupted {expected:.6f}, off by {abs(loss / expected - 1):.1e}")
        assert abs(loss / expected - 1) <= 10 * TOLERANCE


FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
FP8_STEPS, FP8_SAVED_AFTER = 30, 20


def bf16_trainer(**options) -> Trainer:
    """A trainer whose weights are the same for all `options`."""
    tensor_parallel.model_parallel_cuda_manual_seed(2)
    torch.manual_seed(7)
    one = dist.get_world_size() == 1
    options |= {"bf16": True, "params_dtype": torch.bfloat16}
    return Trainer(not one, fuser=False, accumulate=True, lr=2e-3, rows=QUANTIZED_ROWS, **options)


def recipes(folder: Path) -> None:
    """Trains with each FP8 recipe. The loss is within 2 % of that without, and a run that loads a checkpoint continues
    with bit-equal states and losses."""
    os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"  # the checkpoint is our own
    trainer = bf16_trainer()
    plain = [trainer.step(number)[0] for number in range(FP8_STEPS)]
    for name in FP8_RECIPES:
        options, place = {"fp8": "hybrid", "fp8_recipe": name}, folder / f"{name}_{dist.get_world_size()}"
        trainer, losses = bf16_trainer(**options), []
        for number in range(FP8_STEPS):
            if number == FP8_SAVED_AFTER:
                trainer.save(place)
                saved = trainer.model.module.state_dict()
                saved = {key: value.clone() for key, value in saved.items() if value is not None}
            losses.append(trainer.step(number)[0])
        loaded = bf16_trainer(**options)
        loaded.load(place)
        found = loaded.model.module.state_dict()
        assert {key for key, value in found.items() if value is not None} == set(saved)
        weights = {key: value for key, value in saved.items() if not key.endswith("_extra_state")}  # these are pickled
        different = [key for key, value in weights.items() if not torch.equal(found[key], value)]
        assert not different, (name, different)
        assert (name == "delayed") == any(saved[key].numel() for key in saved if key.endswith("_extra_state"))
        continued = [loaded.step(number)[0] for number in range(FP8_SAVED_AFTER, FP8_STEPS)]
        assert continued == losses[FP8_SAVED_AFTER:], (continued, losses[FP8_SAVED_AFTER:])
        off = max(abs(loss / other - 1) for loss, other in zip(losses, plain, strict=True))
        print(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}, off bf16 by at most {off:.1e}", flush=True)
        assert losses != plain and off < 0.02, (name, losses, plain)


def limits(folder: Path) -> None:
    """What runs and is not compared with anything exact, and what raises, with a reason."""
    experts = {"num_moe_experts": 4, "moe_router_topk": 2}
    plain = loss_of(**experts)
    for recipe in ("tensorwise", "blockwise", "mxfp8"):
        quantized = loss_of(**experts, fp8="hybrid", fp8_recipe=recipe)
        off = ((quantized - plain).abs().median() / plain.std()).item()  # some tokens go to another expert
        print(f"experts with {recipe}: the median token's loss off by {off:.1e} of their deviation", flush=True)
        assert 0 < off < 0.05, (recipe, off)
    loss_of(bf16=True, params_dtype=torch.bfloat16)
    loss_of(hidden_dropout=0.1, attention_dropout=0.1)
    raises("cudagraph", cuda_graph_impl="local")


def loss_of(**options) -> torch.Tensor:
    """Runs forward and backward of a model with `options`, whose weights depend only on its shapes."""
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(2)
    spec = layer_spec(experts=options.get("num_moe_experts"))
    settings = config(False, False, **PLAIN, **options)
    model = GPTModel(settings, spec, VOCAB, max_sequence_length=QUANTIZED_ROWS, position_embedding_type="rope")
    tokens = torch.randint(VOCAB, (1, BATCH, QUANTIZED_ROWS + 1), generator=drawn(1))
    losses, _ = Trainer.forward(iter(tokens), model)
    losses.mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    return losses


def raises(reason: str, **options) -> None:
    try:
        loss_of(**options)
    except Exception as error:
        print(f"{options}: {error}", flush=True)
        assert reason in str(error), error
    else:
        raise AssertionError(f"{options} did not raise: update docs/transformer_engine.md")


CASES = {"same": same, "train": train, "resume": resume, "recipes": recipes, "limits": limits}


def initialize(what: str, sizes: tuple[str, ...] = ("tensor_model_parallel_size",)) -> Path:
    """Starts this rank of a case with the parallel sizes of parallel_state, over all ranks. Returns its folder."""
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{folder}/store_{what}_{world}"
    torch.set_num_threads(1)
    torch.set_default_device("cuda")
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel(**dict.fromkeys(sizes, world))
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return folder


def main(cases: dict) -> None:
    """Runs the cases that the command line names. A case is a function, with tensor parallelism over all ranks; or a
    function and the sizes of parallel_state."""
    for what in sys.argv[2:]:
        case, *sizes = cases[what] if isinstance(cases[what], tuple) else (cases[what],)
        case(initialize(what, *sizes))
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
