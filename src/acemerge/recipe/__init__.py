"""What a user can ask for, and how it is to be run."""
