"""PyTorch's own tests of torch.distributed, with pycollective in the place of Gloo."""

RANKS = 3

# Tests that Gloo passes and pycollective does not, and why.
REASONS = {
    "test_ddp_logging_data_cpu": "asks DDP's log for Gloo's number of threads",
}
