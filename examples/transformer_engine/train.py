"""Trains a small GPT of Transformer Engine's layers to continue counting. Several ranks run it tensor parallel:

python train.py --steps 40 --checkpoint run
torchrun --standalone --nproc-per-node 2 train.py --steps 40
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformer_engine.pytorch as te
from transformer_engine.common import recipe

VOCABULARY, LENGTH, WIDTH, HEADS, GROUPS, LAYERS = 64, 16, 64, 4, 2, 2
DEVICE = "cuda"


class GPT(torch.nn.Module):
    def __init__(self, fuse_wgrad=False, group=None):
        super().__init__()
        parallel = {}
        if group is not None:
            parallel = {"tp_group": group, "tp_size": dist.get_world_size(group), "set_parallel_mode": True}
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH, device=DEVICE)
        self.positions = torch.nn.Embedding(LENGTH, WIDTH, device=DEVICE)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                hidden_size=WIDTH,
                ffn_hidden_size=2 * WIDTH,
                num_attention_heads=HEADS,
                num_gqa_groups=GROUPS,
                layer_number=1 + i,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                attn_input_format="bshd",
                fuse_qkv_params=True,
                fuse_wgrad_accumulation=fuse_wgrad,
                device=DEVICE,
                **parallel,
            )
            for i in range(LAYERS)
        )
        self.head = te.ops.Sequential(
            te.ops.RMSNorm(WIDTH, device=DEVICE),
            te.ops.BasicLinear(WIDTH, VOCABULARY, device=DEVICE, accumulate_into_main_grad=fuse_wgrad),
        )
        for weight in self.fused_weights() if fuse_wgrad else ():
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)

    def fused_weights(self):
        """Returns the weights of Transformer Engine's linears, whose gradients are added to `main_grad`."""
        return [p for p in [*self.layers.parameters(), *self.head.parameters()] if p.dim() == 2]

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def local_shard(name, whole, like):
    """Returns this rank's shard of a Parameter of the full model."""
    if not getattr(like, "tensor_model_parallel", False):
        return whole
    dim = like.partition_dim
    stacked = 2 if name.endswith("fc1_weight") else 1  # gate and up are concatenated; each is sharded
    return torch.cat([t.chunk(dist.get_world_size(), dim)[dist.get_rank()] for t in whole.chunk(stacked, dim)], dim)


def make_model(fuse_wgrad=False):
    """Returns the model, or this rank's shards of it. The weights do not depend on the number of ranks."""
    torch.manual_seed(0)
    whole = GPT(fuse_wgrad)
    if not dist.is_initialized():
        return whole
    model = GPT(fuse_wgrad, dist.group.WORLD)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(local_shard(name, whole.get_parameter(name), p))
    return model


def batch(step, rows=16):
    """Returns sequences that count by one, two or three, the same for each run of a step."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (rows, 1), generator=generator)
    by = torch.randint(1, 4, (rows, 1), generator=generator)
    return ((first + by * torch.arange(LENGTH + 1)) % VOCABULARY).to(DEVICE)


def train_step(model, optimizer, tokens, microbatches=1, fuse_wgrad=False, fp8=False):
    """Runs one optimizer step on the mean of all micro-batches and returns the loss."""
    optimizer.zero_grad()
    for weight in model.fused_weights() if fuse_wgrad else ():
        weight.main_grad.zero_()
    total = 0.0
    for part in tokens.chunk(microbatches):
        with te.fp8_autocast(enabled=fp8, fp8_recipe=recipe.Float8CurrentScaling()):
            logits = model(part[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) / microbatches
        loss.backward()
        total += loss.item()
    for weight in model.fused_weights() if fuse_wgrad else ():
        weight.grad = weight.main_grad
    optimizer.step()
    return total


def save(file, model, optimizer, step):
    """Writes a new file and renames it, so that a process killed here leaves the old checkpoint intact."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{file}.new")
    os.replace(f"{file}.new", file)


def load(file, model, optimizer):
    state = torch.load(file, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"]


def main(arguments=None):
    """Trains with the given command line and returns the losses of the steps it ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="total number of steps, including those of resumed runs")
    parser.add_argument(
        "--microbatches", type=int, default=1, help="micro-batches per batch; their gradients are accumulated"
    )
    parser.add_argument("--fuse-wgrad", action="store_true", help="add weight gradients to main_grad")
    parser.add_argument("--fp8", action="store_true", help="compute linears in FP8")
    parser.add_argument("--checkpoint", type=Path, help="folder; resumed from if it exists, saved to at the end")
    args = parser.parse_args(arguments)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    model = make_model(args.fuse_wgrad)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    file = args.checkpoint and args.checkpoint / f"rank{rank}.pt"
    first = load(file, model, optimizer) if file and file.exists() else 0
    losses = []
    for step in range(first, args.steps):
        tokens = batch(step)
        losses.append(train_step(model, optimizer, tokens, args.microbatches, args.fuse_wgrad, args.fp8))
        if rank == 0:
            print(f"step {step} loss {losses[-1]:.6f}", flush=True)
    if file:
        save(file, model, optimizer, args.steps)
    if ranks > 1:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
