"""`python -m pycomm.doctor`: what is installed, how ranks would talk, and what stands in the way.

A check is two steps: facts, which a child process looks up where looking could end it (probe.py),
and findings, which a function makes of the facts. docs/doctor.md has the list.
"""
