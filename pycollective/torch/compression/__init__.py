"""Error feedback for DDP and for tensors of any program."""
