"""Broken on purpose: kernels with one mistake each, every one of which the checker has to reject by name."""
