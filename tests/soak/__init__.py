"""A long run: training through kills, shrinks, restarts, cuts and errors, in flat memory.

A cycle is drawn from (seed, number) alone, so every one can be played again:

python -m tests.soak --minutes 60 --seed 7 --csv samples.csv
python -m tests.soak --seed 7 --cycle 12
python -m tests.soak --minutes 30 --joins

`schedule` draws cycles, `rank` is what a process does, `director` leads the processes through the
cycles, `held` looks at what they hold, and says whether that is flat.
"""
