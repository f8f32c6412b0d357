"""A runnable pipeline for video with sound, of torch alone, from a test's size to that of the largest open models."""
