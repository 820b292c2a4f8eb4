"""Messages of the logger ``torchweft``, which ``TORCH_LOGS="+torchweft"`` prints: plans with the fusions that were
rejected, and modules that cannot be part of a pipeline."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from . import _C

if TYPE_CHECKING:
    from ._segments import Segment

_logger = logging.getLogger("torchweft")


def log_plan(label: str, text: str) -> None:
    """Logs the plan of a first call of this kind. Called from C++."""
    _logger.debug("plan of a pipeline that begins with %s:\n%s", label, text.rstrip())


def log_segments(owner: object, segments: list[Segment]) -> None:
    """Turns logging of new plans on or off, and logs why modules are called between pipelines."""
    enabled = _logger.isEnabledFor(logging.DEBUG)  # not known at import: torch imports torchweft to read TORCH_LOGS
    _C.set_plan_logging(enabled)
    for segment in segments:
        if enabled and segment.reason is not None:
            module = type(segment.modules[0]).__name__
            _logger.debug("%s: %s is not part of a pipeline: %s", type(owner).__name__, module, segment.reason)
