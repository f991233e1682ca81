"""Measurements of the machine and its links, for predictions."""
