"""Numbers with units: parsing of "25M", "1gbit", "50us", "3GB/s", and formatting."""

from __future__ import annotations

import math
import re

_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}


def parse_count(text: str) -> int:
    """Return the number in "25M", "7B", "1.3e6" or "1000".

    Raises:
        ValueError: the text is something else, or no positive whole number.
    """
    match = re.fullmatch(r"\s*([\d.]+(?:e\d\d?)?)\s*([kmgbt]?)\s*", text, re.IGNORECASE)
    powers = _POWERS | {"b": 1e9}
    count = _number(match[1], powers[match[2].lower()], text) if match else 0.0
    if count < 1:
        raise ValueError(f"cannot read the number {text!r}: want 25M, 7B or 1000")
    return round(count)


def parse_rate(text: str) -> tuple[float, bool]:
    """Return the bytes per second of "100mbit" or "25GB/s", and whether the unit was bits.

    Raises:
        ValueError: the text is something else.
    """
    match = re.fullmatch(
        r"\s*([\d.]+(?:e\d\d?)?)\s*([kmgt]?)(bit|bps|B)(?:it)?(?:/s|ps)?\s*", text, re.IGNORECASE
    )
    if not match:
        raise ValueError(f"cannot read the rate {text!r}: want 100mbit, 10gbit or 25GB/s")
    bits = match[3] not in ("B", "Bps")
    rate = _number(match[1], _POWERS[match[2].lower()], text) / (8 if bits else 1)
    if rate <= 0:
        raise ValueError(f"the rate {text!r} is not above 0")
    return rate, bits


def parse_time(text: str) -> float:
    """Return the seconds in "50us", "120ms", "0.3s" or "0.3".

    Raises:
        ValueError: the text is something else.
    """
    match = re.fullmatch(r"\s*([\d.]+(?:e-?\d\d?)?)\s*(ns|us|ms|s|)\s*", text)
    if not match:
        raise ValueError(f"cannot read the time {text!r}: want 50us, 120ms or 0.3s")
    return _number(match[1], _SECONDS[match[2]], text)


def parse_share(text: str) -> float:
    """Return the share in "0.1%" or "0.001".

    Raises:
        ValueError: the text is something else, or not from 0 to 1.
    """
    match = re.fullmatch(r"\s*([\d.]+(?:e-?\d+)?)\s*(%?)\s*", text)
    share = _number(match[1], 1.0, text) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"cannot read the share {text!r}: want 0 to 100%, such as 0.1%")
    return share


def _number(digits: str, unit: float, text: str) -> float:
    try:
        number = float(digits) * unit
    except ValueError:
        number = math.inf
    if number == math.inf:  # of 1.2.3, and of 1e999
        raise ValueError(f"cannot read the number in {text!r}")
    return number


def format_time(seconds: float) -> str:
    """Return three digits and a unit: "1.23 ms"."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * unit:  # else three digits would be "1e+03" of the smaller one
            return f"{seconds / unit:.3g} {name}" if seconds < 999.5 * unit else f"{seconds:.0f} s"
    return f"{seconds / 1e-6:.3g} us"


def format_bytes(count: float) -> str:
    """Return three digits and a unit: "13.7 MB"."""
    return _scaled(count, "B")


def format_rate(rate: float) -> str:
    """Return bytes per second in a line's unit: "1 Gbit/s"."""
    return _scaled(8 * rate, "bit/s")


def format_count(count: float) -> str:
    """Return three digits and a power: "25.4 M"."""
    return _scaled(count, "").rstrip()


def _scaled(value: float, unit: str) -> str:
    scale = 0
    while scale < 4 and value >= 999.5:
        value, scale = value / 1e3, scale + 1
    return f"{value:.3g} {('', 'k', 'M', 'G', 'T')[scale]}{unit}"
