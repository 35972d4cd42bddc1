"""Tensors in, tensors out: the arithmetic of each analysis."""
