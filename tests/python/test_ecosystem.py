"""transformers, accelerate, peft and torchao on models with weft's operations. Each test needs its library."""

from importlib.util import find_spec

import pytest
import torch

from torchweft import ops


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = ops.Sequential(ops.RMSNorm(16), ops.Linear(16, 32), ops.GELU(), ops.Linear(32, 16))
        self.head = ops.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def test_parameters_are_registered_by_the_hook_of_module(monkeypatch):
    """accelerate.init_empty_weights replaces Module.register_parameter, as this test does."""
    register = torch.nn.Module.register_parameter

    def on_meta(self, name, param):
        register(self, name, None if param is None else torch.nn.Parameter(param.to("meta")))

    monkeypatch.setattr(torch.nn.Module, "register_parameter", on_meta)
    assert all(p.is_meta for p in Net().parameters())


@needs("transformers")
def test_pretrained_model_of_transformers(tmp_path):
    import transformers

    class Config(transformers.PretrainedConfig):
        model_type = "weft-test"

    class Model(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config):
            super().__init__(config)
            self.net = Net()
            self.post_init()

        def _init_weights(self, module):
            pass

        def forward(self, x):
            return self.net(x)

    model = Model(Config())
    model.save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path)
    assert torch.equal(loaded(X), model(X)) and loaded.state_dict().keys() == model.state_dict().keys()


@needs("accelerate")
def test_accelerate(tmp_path):
    import accelerate

    accelerator, net = accelerate.Accelerator(cpu=True), Net()
    expected = net(X)
    accelerator.save_model(net, tmp_path)
    with accelerate.init_empty_weights():
        empty = Net()
    assert all(p.is_meta for p in empty.parameters())
    loaded = accelerate.load_checkpoint_and_dispatch(empty, tmp_path, device_map={"": "cpu"})
    assert torch.equal(loaded(X), expected)
    assert torch.equal(accelerate.cpu_offload(loaded, torch.device("cpu"))(X), expected)
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.backward(net(X).square().mean())
    optimizer.step()
    assert not torch.equal(net(X), expected)


@needs("peft")
def test_lora_of_peft():
    import peft

    net = Net()
    expected = net(X)
    config = peft.LoraConfig(target_modules=["head", "block.1"], r=2)
    config._register_custom_module({ops.Linear: peft.tuners.lora.Linear})
    tuned = peft.get_peft_model(net, config)
    torch.testing.assert_close(tuned(X), expected)
    for name, p in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    y = tuned(X)
    y.sum().backward()
    assert all((p.grad is not None) == ("lora" in name) for name, p in tuned.named_parameters())
    torch.testing.assert_close(tuned.merge_and_unload()(X), y)


@needs("torchao")
def test_quantized_weight_of_torchao_raises():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    net = Net()
    quantize_(net, Int8WeightOnlyConfig(), filter_fn=lambda module, _: isinstance(module, ops.Linear))
    with pytest.raises(NotImplementedError, match="a parameter is a Int8Tensor, a tensor subclass"):
        net(X)
