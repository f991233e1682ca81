"""Hooks that make trainers send their gradients compressed."""
