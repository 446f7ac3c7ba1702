"""Timing on a GPU, recorded results (results/*.json) and figures that others published (published/*.csv)."""
