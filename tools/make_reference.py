#!/usr/bin/env python3
"""Generates docs/reference.md from the docstrings of torchweft.ops; tests/python/test_docstrings.py compares them."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"
sys.path.insert(0, str(ROOT / "python"))

HEAD = """# Operations

<!-- written by tools/make_reference.py -->

All operations are in `torchweft.ops`. `*` in a shape stands for any number of leading dimensions. In Python
`help(torchweft.ops.Linear)` shows the same text with an example. All but `Sequential` also take `te_keys` (`bool`):
write Transformer Engine's `state_dict` keys.
"""


def signature(cls: type) -> str:
    """The call without annotations."""
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(cls).parameters.values()]
    return f"{cls.__name__}{inspect.Signature(parameters)}"


def document(cls: type) -> str:
    """The docstring with Markdown's quotes."""
    return re.sub(r":\w+:`", "`", (inspect.getdoc(cls) or "").replace("``", "`"))


def unwrap(section: str) -> list[str]:
    """The entries of a section; continuation lines are indented deeper than the entry."""
    return [" ".join(entry.split()) for entry in re.split(r"\n {4}(?! )", "\n" + section) if entry.strip()]


def entry(text: str) -> str:
    """`name (type): description` as an item of a list."""
    return "- " + re.sub(r"^([*\w]+) \((.*?)\): ", r"**`\1`** (`\2`): ", text)


def section(cls: type) -> str:
    text, *rest = re.split(r"^(Args|Attributes|Shape|Example)::?\n", document(cls), flags=re.MULTILINE)
    bodies = dict(zip(rest[::2], rest[1::2], strict=True))
    lines = [f"## {cls.__name__}", "", f"`{signature(cls)}`", "", " ".join(text.split()), ""]
    lines += [entry(e) for e in unwrap(bodies["Args"].rstrip()) if not e.startswith("te_keys ")]
    lines += [f"- Attribute {e}" for e in unwrap(bodies.get("Attributes", "").rstrip())]
    lines += unwrap(bodies["Shape"].rstrip())
    return "\n".join(lines)


def page() -> str:
    import torchweft

    classes = [torchweft.ops.Sequential, torchweft.ops.Linear, *torchweft.ops.native_classes.values()]
    index = ", ".join(f"[{cls.__name__}](#{cls.__name__.lower()})" for cls in classes)
    return "\n\n".join([HEAD + "\n" + index, *map(section, classes)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
