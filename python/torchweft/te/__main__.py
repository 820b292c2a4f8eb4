"""``python -m torchweft.te [options] (script.py | -m module) [arguments]``: see ``--help``."""

from ..device.__main__ import launch
from ._install import CAPABILITY, FUSION, STRICT, install_from_environment

if __name__ == "__main__":
    launch(
        "python -m torchweft.te",
        "Runs a script or a module with Transformer Engine on simulated CUDA devices.",
        install_from_environment,
        capability=CAPABILITY,
        more={
            "strict": (STRICT, "1", "0: also take shapes that the kernels of a GPU refuse"),
            "fusion": (FUSION, "0", "1: run transformer_engine.pytorch.ops by weft's plans"),
        },
    )
