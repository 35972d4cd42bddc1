"""What everything stands on: errors, names, files, provenance, words and tokens, runs, citations."""
