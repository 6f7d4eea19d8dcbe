"""Formats of weights files, one file each. A file put in this folder is all it takes."""
