"""Checks and timings on a GPU: `python -m pycomm.bench.gpu`."""
