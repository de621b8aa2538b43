"""PyTorch's own tests of torch.distributed, with pycollective in the place of Gloo."""

RANKS = 3

# Tests that Gloo passes and pycollective does not, and why.
REASONS = {
    "test_ddp_logging_data_cpu": (
        "asks that DDP's log name the backend as `dist.get_backend` does; C++ has one name, "
        "`custom`, for all that are not PyTorch's own, by whatever name they are registered. All "
        "else that it asks of one of these holds"
    ),
}


def is_unskipped(name: str) -> bool:
    """Whether it is a test of all_to_all on CPUs, which PyTorch runs over MPI alone."""
    return name.startswith("test_all_to_all") and "cuda" not in name
