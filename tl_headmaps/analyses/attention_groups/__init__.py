"""Which tokens attend to each other, and which heads bind them."""
