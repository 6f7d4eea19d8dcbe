"""One tensor, from memory-mapped files to its merged value."""
