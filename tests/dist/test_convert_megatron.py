"""Unmodified megatron-core loads its checkpoint after torchweft.convert, on another number of ranks.

RANK=0 WORLD_SIZE=2 python test_convert_megatron.py FOLDER save|load runs one rank.
"""

import pathlib
import sys
from functools import partial

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def nan_model(cases):
    """A small GPTModel with NaN Parameters."""
    model = cases.Trainer(sequence=False, fuser=True, accumulate=True).model.module
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def loaded(cases, folder: pathlib.Path):
    """A model loaded from a distributed checkpoint."""
    model = nan_model(cases)
    found = cases.dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))
    assert found["iteration"] == 3
    model.load_state_dict(found["model"], strict=True)
    return model


def same(cases, one, other) -> bool:
    return all(cases.torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def save(cases, folder: pathlib.Path) -> None:
    """Trains and saves a model; rank 0 converts it; each rank loads its own .pt file."""
    from torchweft.convert import compare, convert

    trainer = cases.Trainer(sequence=True, fuser=True, accumulate=True)
    trainer.step(0)
    (folder / "original").mkdir(exist_ok=True)
    cases.dist_checkpointing.save({**trainer.state(), "iteration": 3}, str(folder / "original"))
    if cases.dist.get_rank() == 0:
        convert(folder / "original", folder / "plain", to="safetensors", strict=True)
        convert(folder / "plain", folder / "back", to="torch_dist")
        convert(folder / "plain", folder / "parts", to="pt", tensor_parallel=2)
        convert(folder / "parts", folder / "te.pt", to="te")
        convert(folder / "te.pt", folder / "from_te", to="torch_dist")
        assert compare(folder / "original", folder / "back")[1] == []
    cases.dist.barrier()
    model = nan_model(cases)
    file = folder / "parts" / f"mp_rank_{cases.dist.get_rank():02}" / "model_optim_rng.pt"
    model.load_state_dict(cases.torch.load(file, weights_only=True)["model"], strict=True)
    assert same(cases, model, trainer.model.module)


def load(cases, folder: pathlib.Path) -> None:
    """The checkpoint converted to safetensors and back has the Parameters of the original."""
    original, back = loaded(cases, folder / "original"), loaded(cases, folder / "back")
    assert same(cases, original, back)
    tokens = cases.torch.ones(1, cases.BATCH, cases.ROWS + 1, dtype=cases.torch.int64)
    losses, _ = cases.Trainer.forward(iter(tokens), back)
    assert losses.isfinite().all()


def load_te(cases, folder: pathlib.Path) -> None:
    """Transformer Engine's layout has no iteration in a .pt file, and one extra state for both linears of an MLP."""
    model = nan_model(cases)
    found = cases.dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder / "from_te"))
    model.load_state_dict(found["model"], strict=True)
    assert same(cases, model, loaded(cases, folder / "original"))


def experts(cases, folder: pathlib.Path, grouped: bool) -> None:
    """Expert weights have no name rule: they are converted with their layers and back."""
    from torchweft.convert import convert

    def model():
        spec = cases.get_gpt_layer_with_transformer_engine_spec(num_experts=4, moe_grouped_gemm=grouped)
        settings = cases.config(False, False, layers=2, **cases.GATED, num_moe_experts=4, moe_grouped_gemm=grouped)
        return cases.GPTModel(settings, spec, cases.VOCAB, cases.ROWS, position_embedding_type="rope")

    one, other = model(), model()
    saved, plain, back = (folder / f"experts_{grouped}_{name}" for name in ("saved", "plain.safetensors", "back"))
    saved.mkdir()
    cases.dist_checkpointing.save({"model": one.sharded_state_dict()}, str(saved))
    convert(saved, plain, to="safetensors")
    convert(plain, back, to="torch_dist")
    assert not same(cases, one, other)
    found = cases.dist_checkpointing.load({"model": other.sharded_state_dict()}, str(back))
    other.load_state_dict(found["model"], strict=True)
    assert same(cases, one, other)


def main() -> None:
    import megatron_cases as cases

    folder = cases.initialize(sys.argv[2])
    each, grouped = partial(experts, grouped=False), partial(experts, grouped=True)
    for step in {"save": [save], "load": [load, load_te, each, grouped]}[sys.argv[2]]:
        step(cases, folder)
    cases.dist.barrier()


if __name__ == "__main__":  # a process that writes checkpoints imports this file too
    main()
else:
    from launch import run_ranks
    from test_megatron import needs

    @needs("megatron.core")
    @needs("transformer_engine")
    @needs("psutil")
    def test_megatron_loads_converted_checkpoint_at_another_size(tmp_path):
        """Two ranks save; one loads after conversions to safetensors, .pt and Transformer Engine names and back."""
        run_ranks(pathlib.Path(__file__).name, tmp_path, 2, "save")
        run_ranks(pathlib.Path(__file__).name, tmp_path, 1, "load")
