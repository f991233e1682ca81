"""Straggler monitor: ranks compare once a minute where their time goes, and name the slowest.

``compare.py`` has the statistics of one rank and compares the ranks of a group, ``monitor.py``
exchanges the statistics, and `pycomm.monitor` reports the result. ``docs/monitor.md`` is for users.
"""
