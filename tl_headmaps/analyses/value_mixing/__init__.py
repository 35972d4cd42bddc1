"""How attention mixes value vectors, worked out by hand."""
