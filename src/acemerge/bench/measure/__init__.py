"""Training experts, merging them and scoring the result."""
