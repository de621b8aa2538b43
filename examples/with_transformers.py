"""The transformers Trainer: it uses the existing process group.

torchrun --nproc-per-node 4 examples/with_transformers.py
"""

import argparse
import hashlib
import inspect

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import pycollective.torch  # noqa: F401  (registers the backend)


def train(dataset: list[dict[str, torch.Tensor]], bucket_cap_mb: float) -> Trainer:
    """Train a small GPT-2 over bytes for an epoch."""
    arguments = TrainingArguments(
        # On CPU `ddp_backend` takes nothing but "gloo" and "mpi". Without it the Trainer uses
        # the existing group.
        use_cpu=True,
        ddp_bucket_cap_mb=bucket_cap_mb,
        ddp_find_unused_parameters=False,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        learning_rate=3e-3,
        output_dir="out/transformers",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    shape = GPT2Config(
        vocab_size=256,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    trainer = Trainer(GPT2LMHeadModel(shape), arguments, train_dataset=dataset)
    trainer.train()
    return trainer


def main() -> None:
    """Train on the source of the standard library's argparse with large buckets and with small."""
    dist.init_process_group("pycollective")
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    parts = text[: len(text) // 64 * 64].view(-1, 64)
    dataset = [{"input_ids": part, "labels": part} for part in parts]
    digests: set[str] = set()
    for bucket_cap_mb in (25, 0.1):
        trainer = train(dataset, bucket_cap_mb)
        weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
        everyone: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(everyone, hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])
        digests.update(everyone)
    assert trainer.args.world_size == dist.get_world_size()
    assert dist.get_backend() == "pycollective"
    assert len(digests) == 1, digests  # on every rank, with every size
    loss = trainer.evaluate(dataset[:40])["eval_loss"]
    assert loss < 3, loss  # from 5.5
    if dist.get_rank() == 0:
        print(f"loss {loss:.3f}; weights {digests} with any buckets")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
