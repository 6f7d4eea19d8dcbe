"""What methods that use data measure, and the rows they measure it on."""
