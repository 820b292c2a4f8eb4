"""What a rank computes and moves in a training step, and where the time goes as ranks are added.

    python benchmarks/scale.py                     prints the table
    python benchmarks/scale.py --json FILE         also as a table for tools/make_tables.py

A calculation, not a measurement: docs/scale.md has the formulas. The speed of a core is measured by
benchmarks/python/cost_model.py, and the rate of the network is given.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Model:
    """A decoder with gated MLPs, in bfloat16 with float32 gradients."""

    width: int
    inner: int
    layers: int
    tokens: int  # of a sequence; a micro-batch is one sequence per tensor-parallel group

    @property
    def layer_parameters(self) -> int:
        return 4 * self.width**2 + 3 * self.width * self.inner


@dataclass(frozen=True)
class Job:
    model: Model
    tensor: int  # ranks of a tensor-parallel group
    data: int  # tensor-parallel groups
    cores: int  # of a rank
    network: float  # bytes/s of a rank
    speed: float = 1.0  # of a core, relative to the one measured
    micro_batches: int = 8

    @property
    def ranks(self) -> int:
        return self.tensor * self.data

    def flops(self) -> float:
        """Of one rank and step: 6 per parameter and token, and 7 per token, key and channel for causal attention."""
        m = self.model
        per_token = 6 * m.layer_parameters + 7 * m.tokens * m.width
        return self.micro_batches * m.tokens * m.layers * per_token / self.tensor

    def tensor_bytes(self) -> float:
        """Received by one rank in a step: ten gathers or scatters of the activations per layer."""
        m = self.model
        rows = m.tokens * (self.tensor - 1) / self.tensor
        return self.micro_batches * m.layers * 10 * rows * m.width * 2

    def data_bytes(self) -> float:
        """Received by one rank in a step: float32 gradients are reduce-scattered, bfloat16 weights gathered."""
        m = self.model
        return m.layers * m.layer_parameters / self.tensor * (self.data - 1) / self.data * (4 + 2)

    def gigabytes(self) -> float:
        """Weights in bfloat16, gradients in float32, and a share of the optimizer's three float32 copies."""
        return self.model.layers * self.model.layer_parameters / self.tensor * (2 + 4 + 12 / self.data) / 1e9


LLAMA_8B = Model(4096, 14336, 32, 4096)
CLUSTER = 100 * GIGABIT
JOBS = {
    "8 ranks, one host": Job(LLAMA_8B, tensor=8, data=1, cores=8, network=20e9),
    "8 ranks, 1 Gb/s": Job(LLAMA_8B, tensor=8, data=1, cores=8, network=GIGABIT),
    "8 ranks, 100 Gb/s": Job(LLAMA_8B, tensor=8, data=1, cores=8, network=CLUSTER),
    "8 ranks, 100 Gb/s, cores 10 times as fast": Job(LLAMA_8B, tensor=8, data=1, cores=8, network=CLUSTER, speed=10),
    "1,024 ranks, 100 Gb/s": Job(LLAMA_8B, tensor=8, data=128, cores=8, network=CLUSTER),
    "10,000 ranks, 100 Gb/s": Job(LLAMA_8B, tensor=8, data=1250, cores=8, network=CLUSTER),
}
COLUMNS = ["job", "GEMMs and attention", "TP bytes", "TP time", "TP overlapped / plain step", "DP bytes", "DP time",
           "memory"]  # fmt: skip


def row_of(name: str, job: Job, core_flops: float) -> list[str]:
    compute = job.flops() / (core_flops * job.speed * job.cores)
    tensor, data = job.tensor_bytes() / job.network, job.data_bytes() / job.network
    overlapped = (max(compute, tensor) + data) / (compute + tensor + data)
    return [name, f"{compute:.1f} s", f"{job.tensor_bytes() / 1e9:.1f} GB", f"{tensor:.2f} s", f"{overlapped:.3f}",
            f"{job.data_bytes() / 1e9:.2f} GB", f"{data:.2f} s", f"{job.gigabytes():.1f} GB"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    core_flops = json.loads((RESULTS / "cost-model.json").read_text())["core_gflops"] * 1e9
    rows = [row_of(name, job, core_flops) for name, job in JOBS.items()]
    for row in [COLUMNS, *rows]:
        print(" | ".join(row))
    if arguments.json:
        made = {"date": datetime.date.today().isoformat(), "command": " ".join(["benchmarks/scale.py", *sys.argv[1:]])}
        arguments.json.write_text(json.dumps({**made, "columns": COLUMNS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
