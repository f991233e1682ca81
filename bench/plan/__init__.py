"""The planner against the machine: `python -m pycomm.bench plan`."""
