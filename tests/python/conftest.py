import pathlib
import sys

import pytest
import torch

# Test files import the modules beside them, also when pytest runs from elsewhere.
sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(autouse=True)
def fixed_seed():
    """Every test starts from the same seed and leaves torch's defaults as it found them."""
    torch.manual_seed(1234)
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_num_threads(1)  # tensors here are small
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


def pytest_make_parametrize_id(config, val, argname):
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None
