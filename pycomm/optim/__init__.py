"""Optimizers whose momentum travels coded, instead of the gradients; docs/optimizers.md."""

from pycomm.optim.coded_adamw import CodedAdamW as CodedAdamW
from pycomm.optim.coded_sgd import CodedSGD as CodedSGD
from pycomm.optim.convert import code_optimizer as code_optimizer
