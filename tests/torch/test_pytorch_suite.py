"""A choice of PyTorch's own tests, with pycollective in the place of Gloo.

All of them: make test-torch-suite.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.harness import ROOT
from tests.torch.pytorch_suite import REASONS

# What each is the only one to ask for; and DDP's, of which some take seconds. Gloo fails
# test_all_to_all_complex, so it tells who is asked.
CHOSEN = """
test_DistributedDataParallelCPU_grad_is_view test_accumulate_gradients_no_sync_grad_is_view
test_all_gather_coalesced_complex test_all_gather_coalesced_with_empty test_all_gather_complex
test_all_gather_object_subgroup test_all_reduce_coalesced_full_group_max
test_all_reduce_coalesced_max_complex_unsupported test_all_reduce_complex_unsupported_ops
test_all_reduce_full_group_min test_all_reduce_sum_async test_all_reduce_sum_complex
test_all_to_all_complex test_all_to_all_group test_all_to_all_single_unequal_split_full_group
test_barrier_timeout_full_group test_batch_isend_irecv_gloo test_batch_isend_irecv_gloo_tags
test_broadcast test_ddp_create_graph test_destroy_full_group test_gather_checks test_get_future
test_grads_same_across_ranks_with_no_sync test_irecv test_isend_torch_profiler
test_monitored_barrier_gloo test_monitored_barrier_gloo_rank_0_timeout
test_monitored_barrier_gloo_subgroup test_reduce_full_group_product test_reduce_sum_twice
test_scatter_checks test_scatter_complex test_scatter_object_list
test_send_recv_any_source_torch_profiler test_send_recv_autograd_profiler test_send_recv_with_tag
test_sparse_all_reduce_sum test_static_graph_api_cpu
""".split()  # noqa: SIM905


# What Gloo inside cannot do: lists of unequal tensors; and ranks that are late for its making fail
# with its store's words.
NOT_ON_DEVICES = {
    *("test_all_to_all_complex", "test_all_to_all_group", "test_barrier_timeout_full_group"),
}


@pytest.mark.storm
@pytest.mark.timeout(420)
@pytest.mark.parametrize("backend", ["pycollective", "on_device"])
def test_pytorchs_own_tests_pass(backend):
    chosen = [each for each in CHOSEN if backend != "on_device" or each not in NOT_ON_DEVICES]
    command = [sys.executable, "-m", "tests.torch.pytorch_suite.running", *chosen]
    environment = {**os.environ, "PYCOLLECTIVE_SUITE_BACKEND": backend}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400, check=True
    )
    outcomes = json.loads(ended.stdout.splitlines()[-1])
    assert set(outcomes) == set(chosen)
    assert {name: why for name, (how, why) in outcomes.items() if how != "passed"} == {}


def test_the_page_has_the_differences_and_their_reasons():
    """The page is written by `make test-torch-suite`, which nobody runs when a reason changes."""
    page = (ROOT / "docs" / "measured" / "torch_suite.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \| (.*) \|$", page, re.M)
    assert sorted((name, why) for name, _, _, why in rows) == sorted(REASONS.items())
    counts = re.findall(r"^\| (?:gloo|pycollective) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.M)
    for how, gloo, ours in zip(("passed", "failed", "skipped"), *counts, strict=True):
        differ = [(a == how) - (b == how) for _, a, b, _ in rows]
        assert int(gloo) - int(ours) == sum(differ), how
    assert f" PyTorch {version('torch').partition('+')[0]}, " in page
