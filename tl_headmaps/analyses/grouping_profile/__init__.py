"""Where heads look: previous token, same word, sentence."""
