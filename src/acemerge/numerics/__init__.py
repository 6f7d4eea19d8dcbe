"""Matrices: no files, no names of tensors."""
