"""Activations, operations and mixed devices of components, found on fake tensors: no weights, no device."""
