"""Faults at random moments: what the ranks that are left say, how soon, and what stays behind.

A case is drawn from (seed, number) alone, so every one can be played again:

python -m tests.faults.injection --seed 7 --cases 1000 --json out.json
python -m tests.faults.injection --seed 7 --case 412
"""
