"""Simulation of a training step, message by message."""
