"""What every other room uses: errors, types, files, provenance, words and tokens, runs, citations."""
