"""The command line: what each command prints, and what it says about mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchweft
from torchweft._cli import _bench, _info, main


@pytest.fixture
def run(capsys):
    """Runs a command in this process; returns what it printed."""

    def call(*argv: str) -> str:
        main(argv)
        return capsys.readouterr().out

    return call


def error_of(*argv: str) -> str:
    """The message with which a command ends."""
    with pytest.raises(SystemExit) as raised:
        main(argv)
    return str(raised.value)


def test_module_runs_as_program():
    environment = {"PYTHONPATH": str(Path(torchweft.__file__).parent.parent), "PATH": ""}
    command = [sys.executable, "-m", "torchweft"]
    version = subprocess.run([*command, "--version"], env=environment, capture_output=True, text=True, check=True)
    assert version.stdout == f"torchweft {torchweft.__version__}\n"
    nothing = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert nothing.returncode == 2 and "COMMAND" in nothing.stderr


FILES = {
    "missing.py": "import nothing_here\n",
    "syntax.py": "x = (\n",
    "ends.py": "import sys\nsys.exit(0)\n",
    "raises.py": "import torch\n\ndef block():\n    return {}['key']\n",
    "forward.py": "from torchweft import ops\nimport torch\n\nclass Block(torch.nn.Module):\n    def __init__(self):\n"
    "        super().__init__()\n        self.op = ops.GELU()\n\n    def forward(self, x):\n        assert x is None\n",
    "lazy.py": "def __getattr__(name):\n    raise ImportError('needs ' + name)\n",
}
SHAPE = ["--shape", "4,8"]
MISTAKES = {
    "no command": ([], "arguments are required: COMMAND"),
    "unknown command": (["expl"], "invalid choice: 'expl'"),
    "explain: no shape": (["explain", "torchweft.ops:GELU"], "arguments are required: --shape"),
    "explain: text as shape": (["explain", "torchweft.ops:GELU", "--shape", "4,x"], "'4,x' is not a shape; expected"),
    "explain: no sizes": (["explain", "torchweft.ops:GELU", "--shape", ""], "'' is not a shape; expected"),
    "explain: dtype in shape": (["explain", "torchweft.ops:GELU", "--shape", "4:float32"], "is not a shape; expected"),
    "explain: huge size": (["explain", "torchweft.ops:GELU", "--shape", "9" * 30], "is not a shape; expected"),
    "explain: no memory": (
        ["explain", "torchweft.ops:GELU", "--shape", "99999999,99999999"],
        "cannot create an input of shape [99999999, 99999999] and torch.float32",
    ),
    "explain: dtype": (["explain", "torchweft.ops:GELU", *SHAPE, "--dtype", "fp32"], "invalid choice: 'fp32' (choose"),
    "explain: import": (["explain", "{}/missing.py:x", *SHAPE], "'nothing_here' ({}/missing.py, line 1)."),
    "explain: syntax": (["explain", "{}/syntax.py:x", *SHAPE], "SyntaxError: '(' was never closed"),
    "explain: exit": (["explain", "{}/ends.py:x", *SHAPE], "cannot import {}/ends.py: SystemExit: 0"),
    "explain: constructor": (["explain", "{}/raises.py:block", *SHAPE], "KeyError: 'key' ({}/raises.py, line 4)"),
    "explain: forward": (["explain", "{}/forward.py:Block", *SHAPE], "AssertionError ({}/forward.py, line 10)"),
    "explain: lazy name": (["explain", "{}/lazy.py:block", *SHAPE], "needs block ({}/lazy.py, line 2)"),
    "explain: no file": (["explain", "{}/none.py:x", *SHAPE], "No such file or directory"),
    "explain: relative": (["explain", ".module:x", *SHAPE], "cannot import .module"),
    "explain: unhashable": (["explain", "torchweft.ops:GELU({[]})", *SHAPE], "unhashable type"),
    "explain: folder": (["explain", "torchweft.ops:GELU", *SHAPE, "--save", "{}/no/x.svg"], "no folder '{}/no'"),
    "bench: threads as float": (["bench", "--threads", "1e9"], "'1e9' is not a number of threads; expected 1 to"),
    "bench: many threads": (["bench", "--threads", "1000000000"], "is not a number of threads; expected 1 to"),
    "bench: no threads": (["bench", "--threads", "0"], "'0' is not a number of threads; expected 1 to"),
    "bench: negative threads": (["bench", "--threads", "-1"], "'-1' is not a number of threads; expected 1 to"),
    "bench: seconds": (["bench", "--seconds", "nan"], "'nan' is not a positive number"),
    "bench: dtype": (["bench", "--dtype", "float16"], "invalid choice: 'float16'"),
    "bench: folder of JSON": (["bench", "--json", "{}/no/x.json"], "cannot write '{}/no/x.json': No such file"),
    "bench: JSON is a folder": (["bench", "--json", "{}"], "cannot write '{}': Is a directory"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(mistake, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_bench, "measure", lambda *_: pytest.fail("it measures before it looks at its arguments"))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    argv, message = MISTAKES[mistake]
    paths = sys.path[:]
    with pytest.raises(SystemExit) as raised:
        main([part.replace("{}", str(tmp_path)) for part in argv])
    printed = str(raised.value.code) if isinstance(raised.value.code, str) else capsys.readouterr().err.rstrip("\n")
    assert raised.value.code and message.replace("{}", str(tmp_path)) in printed
    assert printed.startswith("torchweft") and "\n" not in printed and sys.path == paths


def test_errors_of_user_code_have_no_frames_of_cpp():
    from torchweft._cli._error import describe

    assert describe(RuntimeError("first\nsecond\nException raised from x at y.cpp:3")) == "first second"


# ---- info -----------------------------------------------------------------------------------------------------------


def test_info(run):
    text = run("info")
    assert f"{torchweft.__version__}, built with torch" in text and "kernels" in text and "shared memory" in text
    data = json.loads(run("info", "--json"))
    assert all(data[name] for name in _info.collect()) and data["advice"] == [list(a) for a in _info.find_advice()]


def test_advice(monkeypatch):
    found = {}

    def advice() -> str:
        return "\n".join(" ".join(pair) for pair in _info.find_advice())

    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000000")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000000")
    assert "malloc" not in advice()
    for name, value, expected in (
        ("_huge_pages", "never", "echo madvise"),
        ("_usable_cores", 0, "OMP_NUM_THREADS=0"),
        ("_free_shared_memory", 64 << 20, "64 MiB free"),
        ("_graphviz", False, "apt-get install graphviz"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(_info, name, lambda value=value: value)
            found[name] = expected in advice()
    assert all(found.values()), found
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    if _info._allocator() not in _info._ALLOCATORS:
        assert "MALLOC_TRIM_THRESHOLD_=1000000000" in advice()


# ---- explain --------------------------------------------------------------------------------------------------------


def test_explain_prints_the_plan(run, tmp_path):
    text = run("explain", "torchweft.ops:Linear(256, 1024, bias=True)", "--shape", "64,256")
    assert "linear_bias" in text and "saved for backward" in text
    file = tmp_path / "random.py"
    file.write_text(
        "from torchweft import ops\nblock = ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 64))\ndef make(n=64):\n"
        "    return ops.AddExtraInput()\n"
    )
    paths = sys.path[:]
    assert "RMSNorm(normalized_shape=[64])" in run(
        "explain", f"{file}:block", "--shape", "2,8,64", "--dtype", "float32"
    )
    assert "AddExtraInput" in run("explain", f"{file}:make", "--shape", "4,8", "--shape", "4,8")
    assert "CrossEntropy" in run("explain", "torchweft.ops:CrossEntropy", "--shape", "4,8", "--shape", "4:int64")
    (data,) = json.loads(run("explain", f"{file}:block", "--shape", "8,64", "--no-grad", "--json"))
    assert data["forward"] and not data["saved"]
    run("explain", f"{file}:block", "--shape", "8,64", "--save", str(tmp_path / "plan.dot"))
    assert "digraph" in (tmp_path / "plan.dot").read_text()
    assert sys.path == paths  # a later import must not find the user's random.py


@pytest.mark.parametrize(
    ("target", "message"),
    {
        "torchweft.ops": "names no object; expected MODULE:OBJECT",
        "torchweft.ops:Linaer(2,2)": "torchweft.ops has no 'Linaer'",
        "no_such_module:x": "cannot import no_such_module",
        "torchweft.ops:Linear(open('x'))": "literals as arguments",
        "torchweft.ops:lambda x: x": "literals as arguments",
        "torchweft.ops:Linear(**{})": "literals as arguments",
        "torchweft.ops:Linear(256)": "failed: Linear",
        "torchweft:__version__": "is str, expected a torch.nn.Module",
        "no_such_file.py:block": "cannot import no_such_file.py",
        "torchweft:packed_bytes": "is int, expected a torch.nn.Module",
        "torch.nn:Linear(8,8)": "expected a weft operation",
        "torchweft.ops:Linear(9,8)": "expected 9 features",
    }.items(),
)
def test_explain_mistakes(target, message):
    assert message in error_of("explain", target, "--shape", "4,8")


def test_explain_bad_shape_and_file(capsys):
    with pytest.raises(SystemExit):
        main(["explain", "torchweft.ops:GELU", "--shape", "4,x"])
    assert "'4,x' is not a shape" in capsys.readouterr().err
    assert "plan.txt" in error_of("explain", "torchweft.ops:GELU()", "--shape", "4,8", "--save", "plan.txt")


# ---- bench ----------------------------------------------------------------------------------------------------------


def test_bench(run, tmp_path):
    pytest.importorskip("matplotlib")
    results, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    options = "--json", str(results), "--plot", str(picture), "--threads", "1"
    threads = torch.get_num_threads()
    text = run("bench", "--seconds", "0.1", "--no-compile", *options)
    torch.set_num_threads(threads)
    rows = json.loads(results.read_text())["rows"]
    assert [row["problem"] for row in rows] == ["block", "attention", "step"] and "weft / eager" in text
    for row in rows:
        low, high = row["weft / eager, interval"]
        assert row["rounds"] >= 5 and 0 < low <= row["weft / eager"] <= high
    assert picture.read_bytes()[1:4] == b"PNG"
    assert "expected a name that ends in" in error_of("bench", "--plot", "bench.xyz")
    with pytest.raises(SystemExit):
        main(["bench", "--seconds", "0"])
    assert "'blok' is not a problem; expected block, attention, step" in error_of("bench", "blok")


@pytest.mark.parametrize("name", ["block", "attention", "step"])
def test_bench_compares_the_same_values(name):
    from torchweft._cli._bench_problems import PROBLEMS

    torch.manual_seed(0)
    sides = PROBLEMS[name](torch.float32)
    if name == "step":
        models = [
            dict(zip(run.__code__.co_freevars, run.__closure__, strict=True)) for run in (sides.weft, sides.eager)
        ]
        losses = [cells["call"].cell_contents(*(torch.zeros(2, 2, dtype=torch.long),) * 2) for cells in models]
        torch.testing.assert_close(*losses)
    else:
        torch.testing.assert_close(sides.weft(), sides.eager(), rtol=1e-4, atol=1e-4)


# ---- convert --------------------------------------------------------------------------------------------------------


def test_convert_is_weft_convert(run):
    assert json.loads(run("convert", "names"))["rules"]
    assert error_of("convert", "inspect", "/no/such/file").startswith("torchweft convert: ")
