"""Processes: "nccl" between two ranks under torchrun, and processes that this one starts."""

import json
import multiprocessing
import os
import pathlib
import subprocess
import sys

import pytest
import torch

FOLDER = pathlib.Path(__file__).parent


def test_two_ranks_under_torchrun(run_two_ranks):
    run_two_ranks("torchweft.device", pathlib.Path(__file__).parent / "ranks.py")


def doubled(index, queue):
    x = torch.full((2,), 3.0, device=f"cuda:{index}", requires_grad=True)
    (x * x).sum().backward()
    queue.put((torch.cuda.device_count(), x.grad.tolist()))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_have_the_devices(method):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=doubled, args=(5, queue))
    process.start()
    process.join()
    assert process.exitcode == 0 and queue.get() == (8, [6, 6])


DEVICES = "torch.cuda.device_count(), torch.cuda.is_available() and torch.ones(2, device='cuda:5').sum().item()"


@pytest.fixture
def program(tmp_path):
    """Returns a function that writes a program with these imports, which prints the number of its devices."""

    def write(imports="torch"):
        (tmp_path / "program.py").write_text(f"import {imports}\nprint({DEVICES})")
        return str(tmp_path / "program.py")

    return write


@pytest.mark.parametrize("imports", ["torchweft, torch", "torch, torchweft"])
def test_programs_have_the_devices(imports, program):
    assert subprocess.check_output([sys.executable, program(imports)], text=True) == "8 2.0\n"


def test_a_command_has_the_devices():
    words = [sys.executable, "-c", f"import torch.nn.functional; print({DEVICES})"]
    assert subprocess.check_output(words, text=True) == "8 2.0\n"


def test_ranks_that_a_program_starts_have_the_devices(program):
    torchrun = f"{os.path.dirname(sys.executable)}/torchrun"
    words = [torchrun, "--standalone", "--nproc-per-node", "2", program()]
    assert subprocess.check_output(words, text=True) == "8 2.0\n" * 2


def test_a_launcher_in_a_program_chooses_its_own(program):
    words = [sys.executable, "-m", "torchweft.device", "--devices", "6", program()]
    assert subprocess.check_output(words, text=True) == "6 2.0\n"


def test_programs_without_torchweft_run_as_ever(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('of the user')")
    (tmp_path / "torch.py").write_text("")
    inherited = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([inherited, str(tmp_path)])}
    found = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__file__)"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout == f"of the user\n{tmp_path}/torch.py\n" and not found.stderr
    environment["WEFT_PARENT"] = json.dumps([[3, 0], "torchweft.nothing", "nothing", "torch", {}])
    found = subprocess.run(
        [sys.executable, "-c", "import json"], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout == "of the user\n" and not found.stderr


def test_workers_of_a_data_loader():
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, pin_memory=True):
        assert batch.is_pinned() and batch.cuda().device.index == 0
