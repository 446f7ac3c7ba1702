"""The mistakes that the checker knows: what each would have computed, to be set beside what was computed."""
