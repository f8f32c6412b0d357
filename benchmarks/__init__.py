"""Measurements with their scripts, and the sparse checkpoints that they and the tests are made on."""
