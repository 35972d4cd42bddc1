"""Which weight matrices of which layers matter."""
