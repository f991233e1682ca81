"""Training steps beside what the link allows: `python -m pycomm.bench step`."""
