"""Words about heads: classes of tokens, predicates over (source, target) with their null, and the name they earn."""
