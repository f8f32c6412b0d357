"""Measures the machine and turns facts, pipeline and policy into a plan."""
