"""Many settings of one merge, compared."""
