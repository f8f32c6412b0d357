"""What is placed: readers that discover a pipeline from files, headers only."""
