"""What a head does with the tokens it changes most."""
