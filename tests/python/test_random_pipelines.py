"""Random pipelines compared with plain PyTorch autograd: values, all gradients, and unchanged tensors of the caller.
`pipelines.py` generates a pipeline from a seed."""

import collections

import pipelines
import plain
import pytest
import torch

import torchweft

CHUNK = 10
FAST, SLOW = 200, 2000


def failures(seeds) -> list[str]:
    reports = []
    for seed in seeds:
        program = pipelines.generate(seed)
        try:
            found = pipelines.find_errors(program)
        except Exception as error:  # noqa: BLE001 - the pipeline belongs in the report
            found = [f"{type(error).__name__}: {error}"]
        if found:
            reports.append("\n".join([pipelines.describe(program), *(f"  ! {line}" for line in found)]))
    return reports


@pytest.mark.parametrize("first", range(0, FAST, CHUNK), ids=lambda first: f"{first}-{first + CHUNK - 1}")
def test_random_pipelines_match_plain_torch(first):
    reports = failures(range(first, first + CHUNK))
    assert not reports, "\n\n".join(["", *reports])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_thousand_random_pipelines_match_plain_torch(capsys):
    reports = failures(range(SLOW))
    with capsys.disabled():
        print(f"\n{SLOW} pipelines, {len(reports)} wrong")
    assert not reports, "\n\n".join(["", *reports])


def test_generator_covers_every_op_and_situation():
    seen = collections.Counter()
    for seed in range(FAST):
        program = pipelines.generate(seed)
        nodes = [n for part in program.parts for n in pipelines.flat(part)]
        seen.update(type(n.module).__name__ for n in nodes)
        seen.update(f"layout {g.layout}" for g in program.caller_tensors.values())
        seen.update(f"note {word}" for n in nodes for word in ("more", "shares", "hooked") if word in n.note)
        sources = collections.Counter(name for n in nodes for name in n.takes)
        seen.update(
            {
                program.dtype: 1,
                "two Sequentials": len(program.parts) == 2,
                "extra output of one Sequential into the other": any(s.startswith("first.") for s in sources),
                "fan-out": any(count > 1 for name, count in sources.items() if name.startswith("c")),
                "x as extra input": "x" in sources,
                "hidden output": any(n.channel and not n.public for n in nodes),
                "nested": any(n.nested is not None for part in program.parts for n in part),
                "no rows": any(0 in n.shape for n in nodes),
                "frozen": any(not p.requires_grad for p in program.parameters()),
                "frozen input": not program.caller_tensors["x"].requires_grad,
                **{name: getattr(program, name) for name in ("by_hand", "no_grad", "warm_up", "twice")},
                f"loss {program.loss}": 1,
            }
        )
    expected = {name for name, *_ in torchweft._C.op_types() if name in plain.WRITTEN_OUT}
    expected |= {
        "Linear",
        "Tanh",
        "note more",
        "note shares",
        "note hooked",
        *map("layout {}".format, pipelines.LAYOUTS),
    }
    missing = [what for what, count in seen.items() if count == 0] + sorted(expected - set(seen))
    assert not missing
    assert set(pipelines.DTYPES) <= set(seen)


@pytest.mark.parametrize("what", ("value", "gradient", "caller's tensor"))
def test_wrong_pipeline_is_found(what, monkeypatch):
    """The comparison can fail: with a slightly changed reference, seeds report errors."""
    right = plain.apply

    def perturbed_apply(op, x, *extras, of=lambda p: p):
        y, extra = right(op, x, *extras, of=of)
        if type(op).__name__ != "Bias":
            return y, extra
        return (y + (y.detach() * 1e-3 if what == "value" else (y - y.detach()) * 1e-3), extra)

    def perturbed_forward(program, run, leaves):
        leaves["x"].detach().mul_(1.5)
        return forward(program, run, leaves)

    if what == "caller's tensor":
        forward = pipelines.forward
        monkeypatch.setattr(pipelines, "forward", perturbed_forward)
    else:
        monkeypatch.setattr(plain, "apply", perturbed_apply)
    wrong = 0
    for seed in range(FAST):
        program = pipelines.generate(seed)
        if program.dtype == torch.float64 and any(type(m).__name__ == "Bias" for m in program.modules()):
            wrong += bool(pipelines.find_errors(program))
    assert wrong >= 3
