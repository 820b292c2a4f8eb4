"""Docs match the code: code blocks equal files, shown output equals a run, links resolve, tables equal results."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documented_projects import PAGES as PROJECTS
from documented_projects import commands, files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import make_cpp_reference  # noqa: E402
import make_tables  # noqa: E402

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def run_example(page: str, index: int = 0, folder: Path | None = None) -> str:
    """Returns what a Python block of a page prints with WEFT_TIER=ref; it runs in `folder`."""
    return run_program(blocks(page, "python")[index], folder)


def run_program(program: str, folder: Path | None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "WEFT_TIER": "ref"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip()


@pytest.mark.parametrize("page", ("README.md", "docs/from_torch_nn.md"))
def test_first_example_prints_shown_output(page):
    """With WEFT_TIER=ref, as README says: otherwise the output names the kernels of this machine."""
    assert run_example(page) == blocks(page, "text")[0].rstrip()


def test_five_minutes(tmp_path):
    """The blocks are one program; the commands are those of README and of the C++ page."""
    program = "\n".join(blocks("docs/start.md", "python"))
    printed = run_program(program, tmp_path).splitlines()
    assert printed[0] == "torch.Size([512, 256])" and printed[1] == "operations"
    losses = [float(line.split()[-1]) for line in printed if line.startswith("step ")]
    assert len(losses) == 4 and losses[-1] < losses[0] / 10
    python, cpp = blocks("docs/start.md", "sh")
    assert cpp in blocks("docs/cpp.md", "sh")
    for line in ("pip install scikit-build-core", "pip install --no-build-isolation ."):
        assert line in python and line in blocks("README.md", "sh")[0]


def test_explained_parts_of_the_gpt_are_those_of_the_example():
    program = (ROOT / "examples/python/train_gpt.py").read_text()
    shown = blocks("docs/train_gpt.md", "python")
    assert len(shown) == 3 and all(block in program for block in shown)


def test_cpp_reference_is_generated():
    assert make_cpp_reference.PAGE.read_text() == make_cpp_reference.page(), "run tools/make_cpp_reference.py"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("int f() const { return {}; }", "int f() const;"),
        ("A(int b = {1}) : b_(b), c_{2} {}", "A(int b = {1});"),
        ("/// Uses { braces }; and more.\nint x = {};", "/// Uses { braces }; and more.\nint x = {};"),
        ("class A {\n public:\n  void f();\n\n private:\n  int x_;\n};", "class A {\n  void f();\n};"),
        ("struct A {\n  struct B {\n    int x = 1;\n  };\n  int y() { return 2; }\n};",
         "struct A {\n  struct B {\n    int x = 1;\n  };\n  int y();\n};"),
        ("enum class E { a, b };", "enum class E { a, b };"),
        ("int f() {\n  g(\"}\", '{');  // }\n}\nint x;", "int f();\nint x;"),
    ],
)  # fmt: skip
def test_declarations_of_a_header(code, expected):
    assert make_cpp_reference.declarations(code) == expected


def test_examples_of_quantization_run():
    assert re.fullmatch(r"relative error 0\.0\d+", run_example("docs/quantization.md"))
    assert re.fullmatch(r"relative error 0\.0\d+, scales \(64, 8\)", run_example("docs/quantization.md", 1))


def test_examples_of_compared_recipes_run(tmp_path):
    """Figures depend on the GEMMs of the machine; names do not."""
    page = "docs/compare_recipes.md"
    shown, printed = (text.splitlines() for text in (blocks(page, "text")[0], run_example(page, 0, tmp_path)))
    assert [re.split(r"\s{2,}", line)[:2] for line in printed] == [re.split(r"\s{2,}", line)[:2] for line in shown]
    assert (tmp_path / "inspector.png").exists()
    names = [line[:18].rstrip() for line in blocks(page, "text")[1].splitlines()]
    assert [line[:18].rstrip() for line in run_example(page, 1).splitlines()] == names
    assert re.fullmatch(r"\{'input': 2\d, 'weight': 3\d\}", run_example(page, 2))


def test_documented_cpp_example_equals_built_example():
    assert files("docs/cpp.md")["train_mlp.cpp"] == (ROOT / "examples/cpp/train_mlp.cpp").read_text()


@pytest.mark.parametrize("page", PROJECTS)
def test_documented_project_is_complete(page):
    """tests/wheel_test.sh builds it. Every C++ and CMake block is a file of the project; CMake lists each source."""
    found = files(page)
    assert sorted(found.values()) == sorted(blocks(page, "cpp") + blocks(page, "cmake"))
    sources = re.findall(r"\w+\.cpp", found["CMakeLists.txt"])
    assert sorted(sources) == sorted(name for name in found if name.endswith(".cpp"))
    assert re.search(r"^cmake_minimum_required.*\nproject\(", found["CMakeLists.txt"])
    program = re.search(r"add_executable\((\w+)", found["CMakeLists.txt"])[1]
    assert commands(page).splitlines()[-1] == f"./build/{program}"


@pytest.mark.parametrize("page", PROJECTS)
def test_documented_project_uses_public_headers_and_own_names(page):
    found = files(page)
    for content in found.values():
        included = set(re.findall(r'#include "([^"]+)"', content)) - found.keys()
        assert included <= public_headers(), f"{page} includes {included - public_headers()}"
        for name in re.findall(r'Register<\w+> \w+\{"(\w+)"|\.name = "(\w+)"', content):
            where = ["--", "weft", ":!weft/te"]  # whose arguments are named by Transformer Engine
            taken = subprocess.run(["git", "grep", "-lw", "".join(name), *where], cwd=ROOT, capture_output=True)
            assert not taken.stdout, f"{page}: weft has {''.join(name)} already"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    missing = [t for t in targets if not re.match(r"\w+:", t) and not (page.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", make_tables.pages(), ids=lambda page: page.name)
def test_figure_tables_are_generated_from_stored_results(page):
    text = page.read_text()
    folder = page.parent.relative_to(ROOT)
    assert make_tables.render_tables(text, make_tables.stored, folder) == text, "run tools/make_tables.py --write"
    by_hand = [line for line in make_tables.outside_tables(text) if make_tables.contains_figure(line)]
    assert not by_hand, "figures in a table that tools/make_tables.py does not write"


def test_changed_figure_and_missing_command_are_detected():
    page = "<!-- table: plain r.json -->\n<!-- end of table -->\n"
    result = {"date": "2026-11-15", "command": "x", "columns": ["a"], "rows": [["1.5"]]}
    made = make_tables.render_tables(page, lambda file: json.dumps(result))
    assert "| 1.5 |" in made and make_tables.render_tables(made, lambda file: json.dumps(result)) == made
    assert make_tables.render_tables(made.replace("1.5", "1.4"), lambda file: json.dumps(result)) == made
    with pytest.raises(ValueError, match="no command"):
        make_tables.render_tables(page, lambda file: json.dumps({**result, "command": ""}))
    assert all(map(make_tables.contains_figure, ("| a | 1.06 |", "| 0.19 µs |", "| 5–8 µs | |", "| 0.8 [0.7, 0.9] |")))
    assert not any(map(make_tables.contains_figure, ("| 3 | torch 2.13 |", "| [O/p, I] |", "| `x=0.5` |", "|---|")))


def test_headline_copies_stored_rows():
    page = "<!-- table: headline a:2 -->\n<!-- end of table -->\n"
    rows = [{"row": n, "claim": f"claim {n}", "measured": "0.5", "verdict": "holds"} for n in ("1", "2")]
    result = json.dumps({"date": "2026-11-15", "command": "x", "rows": rows})
    made = make_tables.render_tables(page, {"benchmarks/results/claims-a.json": result}.__getitem__)
    assert "| claim 2 | 0.5 | holds |" in made and "claim 1" not in made and "2026-11-15, `x`." in made
    with pytest.raises(ValueError):
        make_tables.render_tables(page.replace("a:2", "a:3"), lambda file: result)


def test_steps_table_has_a_line_per_variant():
    page = "<!-- table: steps r.json -->\n<!-- end of table -->\n"
    variant = {"tokens_per_s": 12345.6, "ratio": 0.5, "interval": [0.4, 0.6], "peak_bytes": 3 << 20, "first_step_s": 2}
    row = {"preset": "nano", "precision": "bf16", "threads": 2, "variants": {"eager": variant, "weft": variant}}
    result = json.dumps({"date": "2026-11-16", "command": "x", "rows": [row]})
    made = make_tables.render_tables(page, {"r.json": result}.__getitem__)
    assert "| nano | bf16 | 2 | weft | 12,346 | 0.50 [0.40, 0.60] | 3 | 2.0 |" in made and made.count("nano") == 2
    assert "| time / eager |" in made


def test_links_in_stored_results_are_relative_to_page():
    table = "[page](docs/device.md), [site](https://example.org/docs), 0.8 [0.7, 0.9]"
    assert make_tables.relative_links(table, ".") == table
    assert make_tables.relative_links(table, "docs") == table.replace("docs/device.md", "device.md")


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_examples_are_short():
    files = [*ROOT.glob("examples/python/*.py"), *ROOT.glob("examples/cpp/*.cpp")]
    lines = {file.name: len(file.read_text().splitlines()) for file in files}
    assert lines.pop("train_gpt.py") < 150  # a whole training program
    assert lines and max(lines.values()) < 120


def public_headers() -> set[str]:
    listed = re.search(r"list\(APPEND WEFT_PUBLIC_HEADERS(.*?)\)", (ROOT / "CMakeLists.txt").read_text(), re.DOTALL)
    return {*listed[1].split(), *(str(p.relative_to(ROOT)) for p in ROOT.glob("weft/ops/*.h"))}


def test_public_headers_include_public_headers_only():
    public = public_headers()
    for header in public:
        included = set(re.findall(r'#include "([^"]+)"', (ROOT / header).read_text()))
        assert included <= public, f"{header} includes {included - public}"
