"""Optimizers whose momentum travels coded, instead of the gradients; docs/optimizers.md."""

from pycomm.optim.coded_adamw import CodedAdamW as CodedAdamW
from pycomm.optim.coded_sgd import CodedSGD as CodedSGD
from pycomm.optim.convert import code_optimizer as code_optimizer
from pycomm.optim.demo import DeMo as DeMo
from pycomm.optim.distributed_lion import DistributedLion as DistributedLion
from pycomm.optim.one_bit_adam import OneBitAdam as OneBitAdam
from pycomm.optim.shared_mask import SharedMaskAdamW as SharedMaskAdamW
from pycomm.optim.zero_one_adam import ZeroOneAdam as ZeroOneAdam
