"""Every decision about every tensor, made from headers alone."""
