"""A layer includes only lower layers (nn -> fuser -> fused -> ops -> {overlap, quant} -> {kernels, comm} -> core), and
of those and of torch only what the table of ARCHITECTURE.md allows it to know."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

# layer -> the layers it may include, besides itself
MAY_INCLUDE = {
    "core": "",
    "kernels": "core",
    "device": "core",
    "te": "core kernels comm quant ops fused fuser device",
    "comm": "core",
    "quant": "core kernels comm",
    "overlap": "core kernels comm",
    "ops": "core kernels comm quant overlap",
    "fused": "core kernels comm quant overlap ops",
    "fuser": "core kernels comm quant overlap ops fused",
    "nn": "core kernels comm quant overlap ops fused fuser",
    "python": "core kernels comm quant overlap ops fused fuser nn",
}

# What the files of ops share. Any other file of weft/ops is an operation.
OPS_SHARED = (
    "activation_op|attention|call_report|context|field_descriptions|leading_dims|operation|parallel|pass_through|qkv|quantized_gather|registry|saved_recipe|spec"
    "|wgrad_(attrs|handle|queue|sink)"
)
AN_OPERATION = rf"weft/ops/(?!({OPS_SHARED})\.h)"

# layer -> what it must not know: (pattern of an include, what it stands for)
MUST_NOT_KNOW = {
    "core": [(r"ATen/(ops|cpu|native)/|torch/", "arithmetic")],
    "kernels": [(r"torch/csrc/distributed/", "ranks"), (r"torch/", "autograd and modules")],
    "comm": [(r"ATen/ops/(addmm|baddbmm|bmm|linear|matmul|mm)\b", "GEMMs")],
    "overlap": [(r"torch/nn/", "parameters")],
    "ops": [(r"torch/nn/", "modules"), (AN_OPERATION, "other operations")],
    "fuser": [(AN_OPERATION, "concrete operations")],
    "te": [(AN_OPERATION, "concrete operations")],
    "nn": [(r"weft/kernels/", "kernels"), (r"weft/comm/", "transports")],
    "python": [
        (
            r"weft/kernels/(?!packing\.h|quantized_gemm\.h|cpu/gemm_grid\.h)",
            "kernels, other than torchweft.prepack's, quantized GEMMs and the split of GEMMs",
        ),
        (
            r"weft/comm/(?!interrupt\.h|ucx_plugin\.h)",
            "transports, other than Ctrl-C in their waits and why UCX is not used",
        ),
    ],
}

# (pattern of an include, path prefixes where it is allowed, reason)
ONLY_IN = [
    (
        r"torch/csrc/autograd/",
        ("weft/fuser/", "weft/python/", "weft/device/", "weft/te/"),
        "only weft/fuser, the simulated device and the bindings use autograd",
    ),
    (r"torch/torch\.h", (), "it takes 17 s to compile; include narrower headers"),
    (r"\w*mmintrin\.h|x86intrin\.h", ("weft/kernels/cpu/",), "intrinsics are allowed in weft/kernels/cpu only"),
]

INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)


def violations(files):
    """Returns one line for each invalid include in `files`, a dict from path to text."""
    found = []
    for path, text in files.items():
        parts = path.split("/")
        layer = parts[1] if len(parts) > 2 else None  # None: weft/pch.h, weft/version.h, ...
        if layer and layer not in MAY_INCLUDE:
            found.append(f"{path}: unknown layer {layer}")
            continue
        for include in INCLUDE.findall(text):
            if layer and include.startswith("weft/") and include.count("/") > 1:
                other = include.split("/")[1]
                if other != layer and other not in MAY_INCLUDE[layer].split():
                    found.append(f"{path}: {layer} may not include {include}")
            own_header = path.startswith(include.removesuffix(".h"))  # linear_x.cpp is a part of linear.cpp
            for pattern, what in MUST_NOT_KNOW.get(layer, []):
                if re.match(pattern, include) and not own_header:
                    found.append(f"{path}: {include}: {layer} must not know {what}")
                    break
            for pattern, places, why in ONLY_IN:
                if re.match(pattern, include) and not path.startswith(places):
                    found.append(f"{path}: {include} is not allowed here: {why}")
    return found


def sources():
    paths = [p for p in (ROOT / "weft").rglob("*") if p.suffix in {".h", ".cpp"}]
    return {p.relative_to(ROOT).as_posix(): p.read_text() for p in paths}


def test_includes_follow_the_table_of_layers():
    files = sources()
    assert files
    assert violations(files) == []


def test_valid_tree_is_accepted():
    assert not violations(
        {
            "weft/pch.h": "#include <ATen/ATen.h>",
            "weft/core/format.cpp": '#include "weft/core/format.h"\n#include <vector>',
            "weft/ops/bias.h": '#include "weft/ops/operation.h"\n#include "weft/overlap/bulk.h"',
            "weft/nn/linear.h": '#include "weft/fuser/fuser.h"\n#include "weft/core/format.h"',
            "weft/fuser/autograd.cpp": "#include <torch/csrc/autograd/custom_function.h>",
            "weft/kernels/cpu/gemm_amx.cpp": "#include <immintrin.h>",
        }
    )


def test_includes_of_what_a_layer_must_not_know_are_detected():
    planted = {
        "weft/core/value.cpp": "#include <ATen/ops/add.h>",
        "weft/kernels/gemm.cpp": "#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>",
        "weft/kernels/norm.cpp": "#include <torch/library.h>",
        "weft/comm/group.cpp": "#include <ATen/ops/mm.h>",
        "weft/overlap/costs.cpp": "#include <torch/nn/module.h>",
        "weft/ops/bias.cpp": '#include "weft/ops/dropout.h"',
        "weft/fuser/plan.cpp": '#include "weft/ops/basic_linear.h"',
        "weft/te/gemm.cpp": '#include "weft/ops/basic_linear.h"',
        "weft/nn/linear.cpp": '#include "weft/kernels/gemm.h"',
        "weft/nn/sequential.cpp": '#include "weft/comm/shm_transport.h"',
        "weft/python/module.cpp": '#include "weft/kernels/gemm.h"',
        "weft/python/bridge.cpp": '#include "weft/comm/group.h"',
    }
    assert {path.split("/")[1] for path in planted} == set(MUST_NOT_KNOW)
    for path, text in planted.items():
        assert len(found := violations({path: text})) == 1 and "must not know" in found[0], path


def test_invalid_include_is_detected():
    planted = {
        "weft/core/format.h": '#include "weft/kernels/gemm.h"',
        "weft/kernels/gemm.cpp": '#include "weft/comm/communicator.h"',
        "weft/overlap/bulk.cpp": '  #  include "weft/quant/recipe.h"',
        "weft/fused/rules.cpp": '// rules\n#include "weft/fuser/plan.h"',
        "weft/fuser/plan.cpp": '#include "weft/nn/linear.h"',
        "weft/ops/bias.cpp": "#include <torch/csrc/autograd/custom_function.h>",
        "weft/nn/linear.h": "#include <torch/torch.h>",
        "weft/kernels/norm.cpp": "#include <immintrin.h>",
        "weft/utils/misc.h": "",
    }
    for path, text in planted.items():
        assert len(violations({path: text})) == 1, path
