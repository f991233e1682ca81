"""Who comes last, and why: where the time of each rank goes, compared once a minute.

``figures.py`` has what one rank knows of its operations, ``compare.py`` what follows when the ranks
put that together, ``station.py`` how they do so. ``docs/monitor.md`` is for users.
"""

from __future__ import annotations
