"""Trains a small MLP with a torch optimizer in bfloat16 autocast and loads its state_dict into a second one."""

import torch

from torchweft import ops


def mlp() -> ops.Sequential:
    return ops.Sequential(
        ops.RMSNorm(32),
        ops.Linear(32, 128),
        ops.GELU(),
        ops.Linear(128, 32),
    )


torch.manual_seed(0)
model = mlp()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
x = torch.randn(512, 32)
target = x.roll(1, dims=-1)

losses = []
for _step in range(200):
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    loss = torch.nn.functional.mse_loss(y.float(), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert losses[-1] < 0.2 * losses[0]

# Parameters and state_dict are those of torch modules: any torch checkpointing works.
copy = mlp()
copy.load_state_dict(model.state_dict())
model.eval(), copy.eval()
with torch.no_grad():
    assert torch.equal(copy(x), model(x))
print("\n".join(model.state_dict()))
