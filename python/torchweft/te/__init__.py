"""The real, unmodified `transformer_engine` on a machine without a GPU.

Transformer Engine needs a compiled module and CUDA devices. :func:`install` provides both: weft computes on the CPU
what the module computes on a GPU, with the same bytes of quantized values, and the devices are simulated
(:mod:`torchweft.device`)::

    python -m torchweft.te script.py
    pytest -p torchweft.te.pytest_plugin tests/

    import torchweft.te; torchweft.te.install()      # before `import transformer_engine`
"""

from ._fusion import explain
from ._install import install

__all__ = ["explain", "install"]
