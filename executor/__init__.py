"""Interprets a plan: machines, stores, binding, streaming, and the report of what was observed."""
