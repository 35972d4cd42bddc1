"""One file per public call."""
