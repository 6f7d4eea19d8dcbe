"""Look at experts before they are merged: are they mergeable, where do they disagree, which method would lose least."""

DEFAULT_CANDIDATES = ("ace", "tsv_m", "task_arithmetic", "average")
"""The merges that are compared unless others are asked for."""
