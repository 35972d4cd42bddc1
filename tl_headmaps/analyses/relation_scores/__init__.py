"""Which heads implement a relation, from the weights alone."""
