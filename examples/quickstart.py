"""Which heads of a model know capitals, how sure is that, and show me. Run: python examples/quickstart.py

For another model put ``model = load_model("gpt2")`` (or any hub name or folder) instead of the default one.
"""

from tl_headmaps import HeadWeights, Relation, load_default_model, relation_scores, token_grid

model = load_default_model()
weights = HeadWeights.from_model(model)  # read once, ask often

# 1. A bundled relation, every head of the layers where knowledge sits.
heads = [(layer, head) for layer in (22, 23, 24) for head in range(weights.n_heads)]
scores = relation_scores(weights, "country_to_capital", heads=heads)
print(scores)
best, score = scores.top(1)[0]
assert str(best) == "L23H4"
assert 0.7 < score < 0.85
assert scores.null_mean[0, best.layer, best.head] < 0.05, "shuffled targets must not score"

# 2. A relation of your own.
mine = Relation.from_pairs("food_to_country", [("pasta", "Italian"), ("sushi", "Japanese"), ("taco", "Mexican")])
print(relation_scores(weights, mine, heads=[best], multi_token="first"))

# 3. Look at it.
grid = token_grid(weights, best, ["France", "Germany", "Egypt"], ["Cairo", "Paris", "Berlin"])
print(grid)
assert grid.best() == [("France", "Paris"), ("Germany", "Berlin"), ("Egypt", "Cairo")]
