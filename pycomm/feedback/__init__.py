"""Error feedback as state beside the model: the residual of each parameter's payloads.

`Feedback` is the user's configuration. `Residuals` is the memory of one training by parameter name,
which a step reads and writes; a step can be taken back. docs/feedback.md defines the kinds;
csrc/codecs/base/feedback.h implements the same in C++.
"""

from __future__ import annotations

from pycomm.feedback.reshard import Cut as Cut
from pycomm.feedback.reshard import reshard as reshard
from pycomm.feedback.reshard import sources as sources
from pycomm.feedback.residual import Residual as Residual
from pycomm.feedback.residual import encode as encode
from pycomm.feedback.residuals import Residuals as Residuals
from pycomm.feedback.rule import Feedback as Feedback
