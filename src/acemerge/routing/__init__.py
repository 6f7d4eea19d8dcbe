"""Many adapters behind one base: which of them a query is for, and the base with those merged in."""
