"""`python -m pycomm.doctor`: checks the installation, the machine, the network and the job.

A check has two steps: collect facts, in a child process if that may crash (probe.py), and derive
findings from the facts. docs/doctor.md has the list of checks.
"""
