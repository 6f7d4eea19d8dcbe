"""What each method that uses data measures, one file each, called as the method in `methods/`. Importing registers it."""
