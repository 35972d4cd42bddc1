"""Which heads bring two tokens of a text closer together."""
