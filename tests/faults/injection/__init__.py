"""Faults at random moments: survivors' errors, their latency, and leftover resources.

A case is drawn from (seed, number) alone, so that it can be repeated:

python -m tests.faults.injection --seed 7 --cases 1000
python -m tests.faults.injection --seed 7 --case 412
"""
