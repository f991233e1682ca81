"""Programs that the ranks of `python -m pycomm.bench.validate_plan` run."""
