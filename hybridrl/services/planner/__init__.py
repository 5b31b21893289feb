"""Predicts layouts, memory and time of a run before it starts, and chooses its layout."""
