"""Evidence on real models: tasks, experts trained here, every method merged and measured. See docs/bench.md."""
