"""Collectives and groups over emulated links: `python -m pycomm.bench links`."""
