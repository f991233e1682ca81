"""What the process that replicas are forked from has imported (replicas.py)."""

from tests.trainers.kills import preload

preload()
