"""Checks of phase 11c: 11c.1, an exponential by multiplications, is registered in phase_11.py."""

from flashlab.exercises import phase_11 as _phase_11  # noqa: F401
