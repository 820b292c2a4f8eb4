"""Identifiers that were replaced by the field's standard terms do not return, in code, tests or docs."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = "tests/retired_identifiers.txt"
# The changelog tells users what was renamed.
NOT_READ = ("benchmarks/results/", "docs/images/", "CHANGELOG.md", LIST, "tests/identifiers_test.py")


def retired():
    lines = (ROOT / LIST).read_text().splitlines()
    return {name for line in lines if not line.startswith("#") for name in line.split()}


PROSE = re.compile(r'//.*|#.*|""".*?("""|$)|"[^"]*"')


def words(path, line):
    """Returns the words of a line. Names such as `Given` are also English words: they count in code, not in prose."""
    code = PROSE.sub("", line) if path.endswith((".h", ".cpp", ".py")) else ""
    prose = {word for word in re.findall(r"\w+", line) if re.search(r"[a-z][A-Z]|_", word)}
    return prose | set(re.findall(r"\w+", code))


def uses(files, names):
    """Returns `path:line: name` for each retired name in `files`, a dict from path to text."""
    return [
        f"{path}:{number}: {name}"
        for path, text in files.items()
        for number, line in enumerate(text.splitlines(), 1)
        for name in sorted(words(path, line) & names)
    ]


def test_retired_identifiers_are_not_used():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    paths = [p for p in listed if not p.startswith(NOT_READ)]
    files = {p: (ROOT / p).read_text() for p in paths if (ROOT / p).is_file()}
    assert files and uses(files, retired()) == []


def test_use_of_a_retired_identifier_is_found():
    planted = {"weft/comm/a.cpp": "int x;\nRollCall call;", "docs/a.md": "the `why_apart` function, RollCaller"}
    assert uses(planted, retired()) == ["weft/comm/a.cpp:2: RollCall", "docs/a.md:1: why_apart"]
    assert uses({"weft/a.h": "Choice c;  // Given"}, retired()) == ["weft/a.h:1: Choice"]
