import pytest
import torch

from torchweft import device


def pytest_configure(config):
    if not device.is_simulated():
        raise pytest.UsageError(
            "these tests need simulated devices: WEFT_DEVICES=8 pytest -p torchweft.device.pytest_plugin tests/device"
        )


@pytest.fixture(autouse=True)
def fixed_seed():
    """Starts every test from the same seed on device 0."""
    torch.manual_seed(1234)
    torch.cuda.set_device(0)
    torch.set_num_threads(1)  # the tensors are small
