"""The weight matrices of a model's layers by their names, with their outputs and gradients."""
