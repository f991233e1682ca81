"""Groups over links with delay and loss: `python -m pycomm.bench.wan`."""
