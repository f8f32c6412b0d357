"""The plan document: types, JSON, schema, rendering, drift. Imports nothing of ours, and no torch."""
