"""Docstrings of the operations: every argument is described, every example runs."""

import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch

import torchweft
from torchweft import ops

ROOT = Path(__file__).parent.parent.parent
TYPES = {name: (doc, fields, sample) for name, doc, fields, sample in torchweft._C.op_types()}
OPERATIONS = [*TYPES, "Linear", "Sequential"]


def section(name: str, title: str) -> str:
    found = re.search(rf"^{title}::?\n(.*?)(?=^\S|\Z)", inspect.getdoc(getattr(ops, name)), re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize("name", OPERATIONS)
def test_args_are_the_parameters_of_the_signature(name):
    described = re.findall(r"^    (\*?\w+) \((.+?)\): [A-Z`]", section(name, "Args"), re.MULTILINE)
    parameters = inspect.signature(getattr(ops, name)).parameters.values()
    expected = [("*" * (p.kind is p.VAR_POSITIONAL) + p.name, p.annotation) for p in parameters]
    assert described == expected
    for p in parameters:
        assert p.default is p.empty or f"``{p.default!r}``" in section(name, "Args")


def test_subclass_shows_signature_of_own_init():
    class Norm(ops.RMSNorm):
        def __init__(self, width: int, eps: float = 1e-6) -> None:
            super().__init__(width, eps=eps)

    class Renamed(Norm):
        pass

    class SameArguments(ops.RMSNorm):
        pass

    for cls in (Norm, Renamed):
        assert list(inspect.signature(cls).parameters) == ["width", "eps"]
        assert cls(8).weight.shape == (8,)
    assert inspect.signature(SameArguments) == inspect.signature(ops.RMSNorm)


@pytest.mark.parametrize("name", TYPES)
def test_texts_are_sentences(name):
    doc, fields, sample = TYPES[name]
    texts = [doc["summary"], *doc["shape"].split("\n"), *(description for *_, description in fields)]
    texts += [doc["parameters"]] * bool(sample.params()) + [doc["details"]] * bool(doc["details"])
    assert all(text.endswith(".") and text.strip() == text for text in texts)
    assert len(doc["summary"]) <= 120 and "y" in doc["summary"] and " = " in doc["summary"]
    documented = [line.partition(":")[0] for line in section(name, "Attributes").split("\n") if line[4:5].strip()]
    kinds = {param.rstrip("0123456789") for param, *_ in sample.params()}
    assert {re.match(r" *([a-z]+)", text)[1] for text in documented} == kinds


@pytest.mark.parametrize("name", ops.__all__)
def test_examples_run(name):
    public = getattr(ops, name)
    names = {"torch": torch, "torchweft": torchweft}
    examples = doctest.DocTestParser().get_doctest(public.__doc__ or "", names, name, None, 0)
    assert examples.examples or name not in OPERATIONS
    failures = []
    doctest.DocTestRunner().run(examples, out=failures.append)
    assert not failures, "".join(failures)


def test_reference_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import make_reference

    assert make_reference.PAGE.read_text() == make_reference.page(), "run tools/make_reference.py"
