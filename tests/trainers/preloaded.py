"""What the process that replicas are forked from has imported (replicas.py)."""

from tests.trainers.replicas import preload

preload()
