"""Rows of tasks, and where they come from."""
