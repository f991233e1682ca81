"""Error feedback as state beside the model: the residual of each parameter's payloads.

`Feedback` is the user's configuration. `Residuals` is the memory of one training by parameter name,
which a step reads and writes; a step can be taken back. docs/feedback.md defines the kinds;
csrc/codecs/base/feedback.h implements the same in C++.
"""

from __future__ import annotations

from pycomm.feedback.encode import encode
from pycomm.feedback.reshard import Cut, reshard, sources
from pycomm.feedback.residual import Residual
from pycomm.feedback.residuals import Residuals
from pycomm.feedback.rule import Feedback

__all__ = [
    "Cut",
    "Feedback",
    "Residual",
    "Residuals",
    "encode",
    "reshard",
    "sources",
]
