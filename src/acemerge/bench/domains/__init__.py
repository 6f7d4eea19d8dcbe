"""What differs between kinds of model."""
