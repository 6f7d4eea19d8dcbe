"""Data for the methods that use it: where it comes from, the models run on it, and what was measured, kept on disk."""
