"""Self-contained pages, and the parts they are made of."""
