"""The mutants, by part of the sources."""

from __future__ import annotations

from tests.mutants.mutant import Mutant
from tests.mutants.parts import (
    algorithms,
    codecs,
    collectives,
    core,
    elastic,
    kernels,
    optimizers,
    package,
    planning,
    reduction,
    shared_memory,
    tcp,
    torch_binding,
    trainers,
)

PARTS: dict[str, tuple[Mutant, ...]] = {
    "core": core.MUTANTS,
    "codecs": codecs.MUTANTS,
    "kernels": kernels.MUTANTS,
    "algorithms": algorithms.MUTANTS,
    "collectives": collectives.MUTANTS,
    "shared_memory": shared_memory.MUTANTS,
    "tcp": tcp.MUTANTS,
    "torch_binding": torch_binding.MUTANTS,
    "reduction": reduction.MUTANTS,
    "trainers": trainers.MUTANTS,
    "optimizers": optimizers.MUTANTS,
    "elastic": elastic.MUTANTS,
    "package": package.MUTANTS,
    "planning": planning.MUTANTS,
}
