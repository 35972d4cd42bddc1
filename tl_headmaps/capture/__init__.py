"""Everything that touches a running model or its files."""
