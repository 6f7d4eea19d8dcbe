"""Look at experts before they are merged: are they mergeable, and where do they disagree."""

DEFAULT_CANDIDATES = ("ace_auto", "ace", "tsv_m", "task_arithmetic", "average")
"""The merges that are compared unless others are asked for."""
