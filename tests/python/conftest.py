import pathlib
import sys

import pytest
import torch

# Test files import modules from this folder, wherever pytest is started.
sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(autouse=True)
def fixed_seed():
    """Starts every test from the same seed and restores torch's defaults after it."""
    torch.manual_seed(1234)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


def pytest_make_parametrize_id(config, val, argname):
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None
