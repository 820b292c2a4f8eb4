"""Trains a GPT on the characters of a text file, by default a megabyte of Python's standard library, and lets it write.

    python examples/python/train_gpt.py                                          a small model, 150 steps
    python examples/python/train_gpt.py --steps 2000 --resume                    continues to step 2000
    python examples/python/train_gpt.py --size nano --steps 3000 --text book.txt --out book

The folder --out gets checkpoint.pt, loss.png (if matplotlib is installed) and sample.txt.
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from torchweft import ops

SIZES = {"small": (128, 3, 4, 64), "nano": (384, 6, 6, 256)}  # width, layers, heads, characters of a sequence
BATCH, INTERVAL = 16, 25  # sequences in a step, steps between checkpoints
USE_BF16 = torch.cpu.get_capabilities().get("amx_bf16", False)  # without AMX float32 is faster


def residual(name: str, *body: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """x + body(x): the operations between a branch and its sum, joined by a channel."""
    branch = ops.MakeExtraOutput().set_extra_output_channel(0, name, output_to_caller=False)
    return branch, *body, ops.AddExtraInput().set_extra_input_channel(0, name)


def make_layer(width: int, heads: int) -> ops.Sequential:
    """weft fuses the operations, forward and backward, and runs them as one autograd node."""
    attention = ops.DotProductAttention(heads, width // heads, qkv_format="bshd", qkv_layout="group_interleaved")
    return ops.Sequential(
        *residual("x", ops.LayerNorm(width), ops.Linear(width, 3 * width), attention, ops.Linear(width, width)),
        *residual("y", ops.LayerNorm(width), ops.Linear(width, 4 * width), ops.GELU(), ops.Linear(4 * width, width)),
    )


class GPT(torch.nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.positions = torch.nn.Embedding(length, width)
        self.layers = torch.nn.Sequential(*[make_layer(width, heads) for _ in range(layers)])
        self.head = ops.Sequential(ops.LayerNorm(width), ops.Linear(width, vocabulary))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the character after each of tokens [batch, at most length]."""
        return self.head(self.layers(self.embedding(tokens) + self.positions.weight[: tokens.size(1)]))


def read_text(file: Path | None) -> str:
    files = [file] if file else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "".join(f.read_text(encoding="utf-8") for f in files)[: None if file else 1_000_000]


def mean_loss(data: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns the loss of a batch. The seed selects it, so a resumed run sees the batches of an uninterrupted one."""
    starts = torch.randint(len(data) - model.length, (BATCH,), generator=torch.Generator().manual_seed(seed))
    batch = torch.stack([data[i : i + model.length + 1] for i in starts])
    with torch.autocast("cpu", torch.bfloat16, enabled=USE_BF16):
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def sample(start: str, count: int) -> str:
    tokens = torch.tensor([[characters.index(c) for c in start]])
    for _ in range(count):
        logits = model(tokens[:, -model.length :])[:, -1]
        tokens = torch.cat((tokens, torch.multinomial(F.softmax(logits / 0.8, -1), 1)), 1)
    return "".join(characters[i] for i in tokens[0])


def draw(curves: dict[str, dict[int, float]], file: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return print(f"no {file}: matplotlib is not installed")
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, style in (("training", "-"), ("validation", "o-")):
        axes.plot(list(curves[name]), list(curves[name].values()), style, markersize=4, linewidth=1, label=name)
    axes.set(xlabel="step", ylabel="loss per character")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=150, help="in total, including those before --resume")
parser.add_argument("--size", choices=SIZES, default="small")
parser.add_argument("--text", type=Path, help="a text file")
parser.add_argument("--out", type=Path, default=Path("train_gpt"), help="folder of the results")
parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
parser.add_argument("--threads", type=int, default=torch.get_num_threads())
a = parser.parse_args()
torch.set_num_threads(a.threads)
torch.manual_seed(0)

text = read_text(a.text)
characters = "".join(sorted(set(text)))
data = torch.tensor([characters.index(c) for c in text])
validation, training = data[: len(data) // 10], data[len(data) // 10 :]
model = GPT(len(characters), *SIZES[a.size])
if len(validation) <= model.length:
    parser.error(f"the text has {len(text)} characters; --size {a.size} needs {10 * model.length + 10}")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
print(f"{len(text):,} characters; {sum(p.numel() for p in model.parameters()):,} parameters")

curves: dict[str, dict[int, float]] = {"training": {}, "validation": {}}  # losses by step
a.out.mkdir(parents=True, exist_ok=True)
checkpoint = a.out / "checkpoint.pt"
if a.resume:
    state = torch.load(checkpoint, weights_only=True)
    if state["characters"] != characters:
        parser.error(f"{checkpoint} was trained on a text with other characters")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    curves = state["curves"]

start, done = time.perf_counter(), len(curves["training"])
for step in range(done + 1, a.steps + 1):
    optimizer.zero_grad()
    loss = mean_loss(training, seed=step)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    curves["training"][step] = loss.item()
    rate = (step - done) * BATCH * model.length / (time.perf_counter() - start)
    bar = "#" * (30 * step // a.steps)
    print(f"\r[{bar:30}] step {step}  loss {loss:.3f}  {rate:,.0f} tokens/s ", end="", flush=True)
    if step % INTERVAL == 0 or step == a.steps:
        with torch.no_grad():
            curves["validation"][step] = mean_loss(validation, seed=0).item()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "curves": curves, "characters": characters}, checkpoint.with_suffix(".part"))
        checkpoint.with_suffix(".part").replace(checkpoint)  # an interruption leaves the previous one

draw(curves, a.out / "loss.png")
written = sample(text[0], count=400)
(a.out / "sample.txt").write_text(written, encoding="utf-8")
print(f"\n\n{written}\n\nCheckpoint, loss curve and sample are in {a.out}/.")
