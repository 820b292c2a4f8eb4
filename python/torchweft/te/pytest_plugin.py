"""``pytest -p torchweft.te.pytest_plugin``: installs before any test module imports `transformer_engine`.

WEFT_DEVICES, WEFT_DEVICE_CAPABILITY (10.0), WEFT_DEVICE_MEMORY, WEFT_TE_STRICT (1) and WEFT_TE_FUSION (0) choose what
`install` takes.
"""

import pytest

from ._install import install_from_environment

__all__ = ["pytest_load_initial_conftests"]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Installs as the environment says."""
    install_from_environment()
