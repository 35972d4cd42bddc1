"""Results become pictures and text here; nothing here computes."""
