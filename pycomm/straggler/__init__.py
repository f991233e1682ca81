"""Straggler monitor: ranks compare once a minute where their time goes, and name the slowest.

``stats.py`` measures the operations of one rank, ``compare.py`` compares the ranks of a group,
``monitor.py`` exchanges the statistics, and ``show.py`` reports the result.
``docs/monitor.md`` is for users.
"""

from __future__ import annotations
