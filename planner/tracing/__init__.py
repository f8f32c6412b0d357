"""Activations and operations of a component, found on fake tensors: no weights, no device."""
