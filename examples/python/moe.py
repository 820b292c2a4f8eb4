"""A mixture of experts distributed over ranks: a router sends each token to two experts. Run it as one process, or as
`torchrun --nproc-per-node 4 moe.py`, where each rank has a quarter of the experts and of the tokens, with equal losses.
`--plot load.png` draws the load of the experts."""

import argparse
from typing import Any

import torch
import torch.distributed as dist

import torchweft
from torchweft import ops

WIDTH, HIDDEN, EXPERTS, TOP_K, TOKENS = 16, 32, 8, 2, 256


def experts(count: int) -> torchweft.Sequential:
    """y = W2 (p·swiglu(W1 x)), each row with the weights of its expert; one stacked Parameter per layer."""
    return torchweft.Sequential(
        ops.GroupedLinear(count, WIDTH, 2 * HIDDEN, bias=False, single_grouped_weight=True),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(count, HIDDEN, WIDTH, bias=False, single_grouped_weight=True),
    )


class AllToAll(torch.autograd.Function):
    """Sends `send_counts[r]` rows to rank r and receives `recv_counts[r]` from it; gradients take the reverse path."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send_counts: list[int], recv_counts: list[int]) -> torch.Tensor:
        ctx.backward_counts = recv_counts, send_counts
        received = rows.new_empty(sum(recv_counts), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), recv_counts, send_counts)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return AllToAll.apply(grad, *ctx.backward_counts), None, None


class MixtureOfExperts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ranks = dist.get_world_size()
        self.router = ops.Linear(WIDTH, EXPERTS, bias=False)
        all_experts = experts(EXPERTS)  # drawn in full on each rank, so that any number of ranks starts equal
        self.experts = experts(EXPERTS // self.ranks)
        with torch.no_grad():
            for local, full in zip(self.experts.parameters(), all_experts.parameters(), strict=True):
                local.copy_(full.chunk(self.ranks)[dist.get_rank()])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the output, the probabilities [tokens, experts], and the number of tokens of each expert."""
        probs = self.router(x).softmax(-1)
        weight, expert = (t.flatten() for t in probs.topk(TOP_K))
        order = expert.argsort(stable=True)
        token = order // TOP_K
        load = expert.bincount(minlength=EXPERTS)
        # Exchange the row counts per rank and expert first, then the rows and their weights.
        sent = load.view(self.ranks, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        send_counts, recv_counts = sent.sum(1).tolist(), received.sum(1).tolist()
        rows, weight = (AllToAll.apply(t, send_counts, recv_counts) for t in (x[token], weight[order]))
        # The received rows are ordered by rank; sort them by expert.
        expert = torch.arange(received.shape[1]).repeat(self.ranks).repeat_interleave(received.flatten())
        by_expert, splits = expert.argsort(stable=True), received.sum(0)
        y = self.experts(rows[by_expert], splits, weight[by_expert], splits)
        y = AllToAll.apply(y[by_expert.argsort()], recv_counts, send_counts)
        return torch.zeros_like(x).index_add(0, token, y), probs, load


def train(steps: int) -> tuple[MixtureOfExperts, list[float], list[torch.Tensor]]:
    """Returns the trained model, and the loss and the load of the experts in each step."""
    torch.manual_seed(0)
    model, losses, loads = MixtureOfExperts(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    torch.manual_seed(1)  # eight kinds of tokens; each kind has its own linear map to learn
    centers, maps = 2 * torch.randn(8, WIDTH), torch.randn(8, WIDTH, WIDTH) / WIDTH**0.5
    for _ in range(steps):
        kind = torch.randint(8, (TOKENS,))
        tokens = centers[kind] + 0.5 * torch.randn(TOKENS, WIDTH)
        targets = torch.einsum("tj,tij->ti", tokens, maps[kind])
        x, target = (t.chunk(model.ranks)[dist.get_rank()] for t in (tokens, targets))
        y, probs, load = model(x)
        dist.all_reduce(load)
        balance = EXPERTS * (load / load.sum() * probs.sum(0) / TOKENS).sum()  # 1 if the load is even, otherwise larger
        loss = (y - target).square().sum() / (TOKENS * WIDTH) + 0.1 * balance
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(model.router.weight.grad)  # the router is replicated; an expert already saw all its tokens
        optimizer.step()
        dist.all_reduce(total := loss.detach())
        losses.append(total.item())
        loads.append(load)
    return model, losses, loads


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, losses, loads = train(150)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} on {model.ranks} ranks, load {loads[-1].tolist()}")
        assert losses[-1] < 0.2 * losses[0]
    if dist.get_rank() == 0 and options.plot:
        import matplotlib.pyplot as plt

        plt.bar(range(EXPERTS), loads[0], width=-0.4, align="edge", label="first step")
        plt.bar(range(EXPERTS), loads[-1], width=0.4, align="edge", label="last step")
        plt.axhline(TOKENS * TOP_K / EXPERTS, color="gray", linestyle="--", label="even")
        plt.legend(title="tokens of each expert", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
        plt.savefig(options.plot)
    dist.destroy_process_group()
