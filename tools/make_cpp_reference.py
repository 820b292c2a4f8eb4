#!/usr/bin/env python3
"""Generates docs/cpp_reference.md from the public headers; tests/docs_test.py compares them.

A header's block has its comments and declarations: no function bodies, private members, includes or namespaces.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "cpp_reference.md"

HEAD = """# C++ reference

<!-- written by tools/make_cpp_reference.py -->

The declarations of the public headers that programs use. All members are public; bodies are left out.
[weft in C++](cpp.md) has a whole program. Errors are `c10::Error` and its subclasses (`c10::ValueError`,
`c10::TypeError`, `c10::NotImplementedError`).
"""

SECTIONS = {
    "Modules": ["nn/sequential.h", "nn/linear.h", "nn/operation.h", "nn/fusible.h"],
    "Plans": ["fuser/explain.h"],
    "Functions of tensors and text": ["fuser/functional.h"],
    "Quantization": [
        "quant/recipe.h",
        "quant/quantizer.h",
        "quant/standard_recipes.h",
        "kernels/quantize.h",
        "kernels/quantized_gemm.h",
    ],
    "Operations of your own": ["ops/operation.h", "ops/context.h", "ops/spec.h", "ops/registry.h"],
    "Fusions of your own": ["fused/rule.h", "fused/rules.h", "fused/fused_op.h", "kernels/gemm.h"],
}

# Applied in this order to the declarations of a header.
REPLACED = (
    (r"^TORCH_MODULE\((\w+)\);", r"TORCH_MODULE(\1);  // \1: a shared pointer to \1Impl"),
    (r"^template <[^\n]*>\n\w+<\w+>::[^;]*;\n", ""),  # members that are defined outside of their class
    (r"^ *(static )?constexpr auto (\w+::)?fields\(\);\n", ""),
    (r'^inline constexpr const char\* k\w+Doc =(?:"(?:[^"\\]|\\.)*"|\s)*;\n', ""),
    (r"[ \t]+$", ""),
    (r"\n{3,}", "\n\n"),
    (r"\{\n\n", "{\n"),
)


def matching_brace(text: str, start: int) -> int:
    """The index after the brace that closes the one at `start`."""
    depth = 0
    for brace in re.finditer(r"//[^\n]*|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)'|[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return start + brace.end()
    raise ValueError("unbalanced braces")


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


def is_type(statement: str) -> bool:
    return (
        re.search(r"^\s*(template\s*<.*>\s*)?(struct|class|enum)\b", without_comments(statement), re.DOTALL) is not None
    )


def declaration(statement: str) -> str:
    """A function's declaration, from what precedes its body."""
    return (
        re.sub(
            r"\)((?:\s*(?:const|noexcept|override|final))*)\s+:\s(?!:).*\Z", r")\1", statement, flags=re.DOTALL
        ).rstrip()
        + ";"
    )


def public_part(body: str) -> str:
    """The public members of a class."""
    parts = re.split(r"^ *(public|protected|private):\n", body, flags=re.MULTILINE)
    kept = [parts[0], *(text for access, text in zip(parts[1::2], parts[2::2], strict=True) if access == "public")]
    return "".join(kept)


def declarations(text: str) -> str:
    """The text without the bodies of functions and without private members."""
    out, statement, i = "", "", 0
    while i < len(text):
        if text.startswith("//", i):
            end = text.find("\n", i)
            statement, i = statement + text[i : len(text) if end < 0 else end], len(text) if end < 0 else end
        elif text[i] == ";":
            out, statement, i = out + statement + ";", "", i + 1
        elif text[i] == "{":
            end, code = matching_brace(text, i), without_comments(statement)
            if is_type(statement):
                body = text[i + 1 : end - 1]
                if not re.search(r"\benum\b", code):
                    indent = re.search(r"\n( *)\Z", body)
                    body = declarations(public_part(body)).rstrip() + (indent[0] if indent else "")
                out, statement = out + statement + "{" + body + "}", ""
            elif re.search(r"=\s*$|\w$", code.rstrip(" ")) and not re.search(
                r"\)\s*(const|noexcept|override|final|\s)*$", code
            ):
                statement += text[i:end]  # an initial value
            else:
                out, statement = out + declaration(statement), ""
            i = end
        else:
            statement, i = statement + text[i], i + 1
    return out + statement


def block(header: str) -> str:
    text = (ROOT / "weft" / header).read_text()
    spaces = re.findall(r"^namespace ([\w:]+) \{\n(.*?)^\}  // namespace \1", text, re.DOTALL | re.MULTILINE)
    name = max(spaces, key=lambda space: len(space[1]))[0]  # others have forward declarations
    code = declarations("\n".join(code for other, code in spaces if other == name))
    for pattern, replacement in REPLACED:
        code = re.sub(pattern, replacement, code, flags=re.MULTILINE)
    code = code.strip("\n")
    return f"### `weft/{header}`\n\nNamespace `{name}`.\n\n```cpp\n{code}\n```"


def operations() -> str:
    """The classes of operations, by header."""
    rows = ["| header | operations |", "|---|---|"]
    for header in sorted((ROOT / "weft/ops").glob("*.h")):
        names = re.findall(r"^class (\w+) final :", header.read_text(), re.MULTILINE)
        if names:
            rows.append(f"| `weft/ops/{header.name}` | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(
        [
            "## Operations",
            "",
            "`Options` of an operation are its arguments in Python ([reference](reference.md)), with the same "
            "defaults:\n`op<weft::ops::RMSNorm>({.normalized_shape = {256}})`.",
            "",
            *rows,
        ]
    )


def page() -> str:
    sections = [f"## {title}\n\n" + "\n\n".join(map(block, headers)) for title, headers in SECTIONS.items()]
    return "\n\n".join([HEAD.rstrip(), *sections[:1], operations(), *sections[1:]]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
