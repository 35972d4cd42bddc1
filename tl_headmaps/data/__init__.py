"""What analyses are asked about: relations, texts and task items, bundled or of the user."""
