"""The levels of EDEN: those of Lloyd-Max for N(0, 1), by their bits.

They are part of the wire format (docs/wire/eden.md); csrc/codecs/eden.h has the same numbers.
"""

from __future__ import annotations

# Magnitudes of the levels of 1 to 4 bits, after an empty row; a sign takes one of the bits.
# fmt: off
LEVELS: tuple[tuple[float, ...], ...] = (
    (),
    (0.7978846,),
    (0.45278, 1.5104176),
    (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    (0.128395, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
)
# fmt: on


# The thresholds between adjacent levels.
BORDERS: tuple[tuple[float, ...], ...] = (
    (),
    (),
    (0.9815988,),
    (0.5005497, 1.0499573, 1.7479275),
    (0.2582217, 0.5224037, 0.7995498, 1.0992858, 1.4371388, 1.8435318, 2.4008034),
)
