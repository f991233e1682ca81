"""Benchmarks and the demo. Installs as `pycomm.bench`; see `python -m pycomm.bench --help`."""
