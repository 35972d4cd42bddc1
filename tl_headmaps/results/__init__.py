"""Frozen results: values, axis labels and provenance, with save and load."""
