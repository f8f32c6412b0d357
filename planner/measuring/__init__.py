"""Facts: what the host, its accelerators and its disks have for this process."""
