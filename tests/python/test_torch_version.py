"""weft works with the minor version of torch that it was built with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchweft

MINOR = ".".join(torch.__version__.split(".")[:2])


def import_with(version: str) -> str:
    """What `import torchweft` prints if torch says that it is `version`."""
    code = f"import torch; torch.__version__ = {version!r}\ntry:\n    import torchweft; print('imported')\n"
    code += "except ImportError as error:\n    print(error)"
    environment = {**os.environ, "PYTHONPATH": str(Path(torchweft.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("version", ["2.12.1", "2.99.0+cu132", f"{MINOR}0.0", f"3.{MINOR}"])
def test_another_minor_version_is_an_import_error_with_its_cure(version):
    said = import_with(version)
    assert f"was built with torch {MINOR}" in said and f"found torch {version}" in said, said
    assert "pip install --no-build-isolation" in said and "\n" not in said, said


@pytest.mark.parametrize("version", [f"{MINOR}.7", f"{MINOR}.0+cu132"])
def test_other_patches_and_builds_of_the_minor_version_are_imported(version):
    assert import_with(version) == "imported"
