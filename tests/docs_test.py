"""Documents show what is there: code blocks equal files, output equals a run, links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def test_the_first_example_of_the_readme_prints_what_is_shown():
    """With WEFT_TIER=ref, as the page says: the kernels named would otherwise be those of this machine."""
    done = subprocess.run(
        [sys.executable, "-c", blocks("README.md", "python")[0]],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "WEFT_TIER": "ref"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip() == blocks("README.md", "text")[0].rstrip()


SHOWN = [
    ("README.md", 0, "examples/cpp/train_mlp.cpp"),
    ("docs/add_an_op.md", 0, "weft/ops/soft_cap.h"),
    ("docs/add_an_op.md", 1, "weft/ops/soft_cap.cpp"),
    ("docs/add_a_fusion.md", 0, "weft/fused/forward/linear_bias.cpp"),
]


@pytest.mark.parametrize("page, index, file", SHOWN)
def test_a_file_shown_in_a_page_is_the_file(page, index, file):
    assert blocks(page, "cpp")[index] == (ROOT / file).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    missing = [t for t in targets if not re.match(r"\w+:", t) and not (page.parent / t).exists()]
    assert not missing


def test_examples_are_short():
    files = [*ROOT.glob("examples/python/*.py"), *ROOT.glob("examples/cpp/*.cpp")]
    assert files and all(len(file.read_text().splitlines()) < 120 for file in files)


def test_public_headers_include_public_headers_only():
    listed = re.search(r"list\(APPEND WEFT_PUBLIC_HEADERS(.*?)\)", (ROOT / "CMakeLists.txt").read_text(), re.DOTALL)
    public = {*listed[1].split(), *(str(p.relative_to(ROOT)) for p in ROOT.glob("weft/ops/*.h"))}
    for header in public:
        included = set(re.findall(r'#include "([^"]+)"', (ROOT / header).read_text()))
        assert included <= public, f"{header} includes {included - public}"
