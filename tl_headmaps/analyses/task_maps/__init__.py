"""Which heads serve which cognitive function."""
