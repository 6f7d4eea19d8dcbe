"""One question each."""
