"""Setup calls of code written for Transformer Engine are accepted; wrong arguments raise."""

import pytest
import torch

import torchweft
from torchweft import ops


@pytest.fixture(autouse=True)
def clean():
    yield
    torchweft.destroy_ub()


def test_known_keys_and_methods_are_accepted():
    torchweft.initialize_ub(
        [2048, 1024],
        2,
        dtype=torch.bfloat16,
        ub_cfgs={"qkv_fprop": {"method": "ring_exchange"}, "fc1_dgrad": {"method": "bulk"}, "proj_fprop": {}},
        bootstrap_backend="gloo",
    )


def test_second_call_needs_destroy():
    torchweft.initialize_ub([16, 8], 1)
    with pytest.raises(RuntimeError, match="destroy_ub"):
        torchweft.initialize_ub([16, 8], 1)
    torchweft.destroy_ub()
    torchweft.initialize_ub([16, 8], 1)


@pytest.mark.parametrize(
    ("configuration", "words"),
    [({"qkv": {}}, "unknown collective 'qkv'"), ({"qkv_fprop": {"method": "pipeline"}}, "ring_exchange")],
)
def test_invalid_configuration_lists_known_values(configuration, words):
    with pytest.raises(ValueError, match=words):
        torchweft.initialize_ub([16, 8], 2, ub_cfgs=configuration)


def test_fp8_is_rejected():
    with pytest.raises(NotImplementedError, match="FP8"):
        torchweft.initialize_ub([16, 8], 2, use_fp8=True)


def test_userbuffers_options_store_comm_name():
    options = {"comm_name": "fc1"}
    assert ops.BasicLinear(8, 4, userbuffers_options=options).userbuffers_options == "fc1"
    linear = ops.Linear(8, 4, userbuffers_options=options)
    assert linear.basic_ops[0].userbuffers_options == "fc1"
    torch.testing.assert_close(linear(torch.ones(2, 8)), torch.nn.functional.linear(torch.ones(2, 8), linear.weight))
