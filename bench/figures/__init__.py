"""Figures of README and docs, and the page of `python -m pycomm.bench report`."""
