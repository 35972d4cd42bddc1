"""Published experiments end to end."""
