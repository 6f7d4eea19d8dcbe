"""The folder that is written: absent or whole, with its own account."""
