"""What a suite of the paper is made of: metrics, data, zero-shot heads, given checkpoints, and the paper's own numbers."""
