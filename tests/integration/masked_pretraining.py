"""Run train_pretrain_accelerate.py on data with many ignored targets. In half of the sequences no
target counts; in the others the first 1 to 31 count. test_equivalence.py starts this file."""

import sys

from deepspeed import comm

import train_pretrain_accelerate
from lm.data.dataset import PackedDataset
from lm.training.arguments import TrainingArguments
from model import IGNORE_INDEX, loss


class MaskedDataset(PackedDataset):
    every_target_counts = False

    def __getitem__(self, i: int):
        tokens, targets = super().__getitem__(i)
        targets = targets.clone()
        targets[0 if i % 2 else 1 + i % self.seq_len :] = IGNORE_INDEX
        return tokens, targets


if __name__ == "__main__":
    # Compute the loss in chunks, as for a large vocabulary: at most 100 tokens of 400 logits each.
    loss.LARGE_VOCABULARY, loss.CHUNK_LOGITS = 0, 100 * 400
    TrainingArguments.dataset = MaskedDataset
    all_reduce, counts = comm.all_reduce, []

    def counted(tensor, *args, **options):
        counts.append(tensor.numel())
        return all_reduce(tensor, *args, **options)

    comm.all_reduce = counted
    train_pretrain_accelerate.main(sys.argv[1:])
    print(f"DeepSpeed reduced {sum(counts)} elements", flush=True)
