"""Error feedback as state beside the model: what each parameter's payloads still owe.

`Feedback` is what a user says, as data. `Residuals` is what becomes of it in one training: memory
by parameter name, which a step reads and writes and which can be taken back. docs/feedback.md
defines the kinds; csrc/codecs/feedback.h has the same in C++.
"""

from __future__ import annotations

from pycomm.feedback.encode import add_mean, encode, measure
from pycomm.feedback.reshard import Cut, reshard, sources
from pycomm.feedback.residual import Residual
from pycomm.feedback.residuals import Residuals
from pycomm.feedback.rule import Feedback

__all__ = [
    "Cut",
    "Feedback",
    "Residual",
    "Residuals",
    "add_mean",
    "encode",
    "measure",
    "reshard",
    "sources",
]
