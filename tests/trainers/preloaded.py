"""What the process that replicas are forked from has imported (kills.py)."""

from tests.trainers.kills import preload

preload()
