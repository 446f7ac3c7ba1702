"""Timing on a GPU, recorded results (recorded/*.json) and figures that others published (published/*.csv)."""
