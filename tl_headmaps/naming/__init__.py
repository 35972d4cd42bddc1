"""Words about heads: classes of tokens, predicates over (source, target), and their null. No tensors here."""
