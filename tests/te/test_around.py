"""Unmodified accelerate and Lightning train in FP8 with Transformer Engine, each in a process of its own.

They are searched on sys.path; CI installs them in build/te.
"""

from __future__ import annotations

import importlib.util

import pytest
from test_page import run

MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
x, target = torch.randn(2, 32, 64, device="cuda")
"""

ACCELERATE = MODEL + """
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs

accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(fp8_format="HYBRID")])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
losses = []
for _ in range(20):
    loss = nn.functional.mse_loss(model(x).float(), target)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""

LIGHTNING = MODEL + """
import lightning
from lightning.pytorch.plugins import TransformerEnginePrecision

losses = []

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.model(batch[0]).float(), batch[1])
        losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

trainer = lightning.Trainer(
    accelerator="cuda", devices=1, max_steps=20, plugins=[TransformerEnginePrecision(weights_dtype=torch.bfloat16)],
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
module = Module()
trainer.fit(module, torch.utils.data.DataLoader([(x.cpu(), target.cpu())] * 20, batch_size=None))
model = module.model
"""

CHECK = """
kinds = {type(part).__module__.split(".")[0] for part in model.modules() if "Linear" in type(part).__name__}
assert kinds == {"transformer_engine"}, kinds
assert any(part.fp8_initialized for part in model.modules() if hasattr(part, "fp8_initialized"))
assert losses[-1] < 0.8 * losses[0], losses
print("trained", len(losses), "steps")
"""


@pytest.mark.parametrize(("package", "script"), (("accelerate", ACCELERATE), ("lightning", LIGHTNING)))
def test_trains_in_fp8(package, script, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (tmp_path / "train.py").write_text(script + CHECK)
    done = run("-m", "torchweft.te", "train.py", folder=tmp_path)
    assert done.returncode == 0 and "trained 20 steps" in done.stdout, done.stdout + done.stderr
