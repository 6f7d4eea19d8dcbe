"""Quantised models: numbers that stand for floats are read as these, one tensor at a time; a file for each way to store them."""
