"""PEFT adapters as low-rank changes of a base."""
