"""Base, tasks and experts that belong together: ours and the papers'."""
