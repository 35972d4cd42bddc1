"""The weight matrices of a model's layers by name, with their gradients."""
