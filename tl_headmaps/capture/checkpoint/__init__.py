"""Weights from safetensors on disk, without building the model."""
