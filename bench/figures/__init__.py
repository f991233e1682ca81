"""Figures and tables of README and docs, from the tables of bench/results."""
