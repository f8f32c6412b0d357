"""A simulated accelerator, as torch sees a real one, and its machine."""
