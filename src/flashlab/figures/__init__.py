"""What the notebooks show: source and diffs, tables, tiles, fragments, banks, ladders."""
