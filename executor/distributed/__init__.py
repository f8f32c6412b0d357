"""Several processes of torch.distributed: what they agree on, share and gather."""
