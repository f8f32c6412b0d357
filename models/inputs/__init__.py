"""Inputs of sample passes, by class: for tracing without data, and for trying a loaded pipeline."""
