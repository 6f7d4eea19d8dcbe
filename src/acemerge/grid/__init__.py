"""`acemerge sweep`: a method at every point of a grid of settings, in one pass over the models."""
