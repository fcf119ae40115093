"""The training and the validation split of --data."""

import subprocess
import sys
from pathlib import Path

from accelerate import Accelerator

from data.dataset import PackedDataset
from data.errors import DataError
from training.arguments import TrainingArguments


def open_splits(
    args: TrainingArguments, seq_len: int, accelerator: Accelerator
) -> tuple[PackedDataset, PackedDataset | None]:
    """Training and validation split; the built-in corpus is prepared first where that has not
    happened yet.

    Raises:
        DataError: anything wrong with the prepared data.
    """
    if (
        accelerator.is_main_process
        and not Path(args.data).exists()
        and args.data == TrainingArguments.data
    ):
        print(f"no packed data in {args.data} yet: preparing the built-in corpus", flush=True)
        command = [sys.executable, "-m", "scripts.prepare_data", "--data", "builtin"]
        if subprocess.run([*command, "--out", args.data]).returncode:
            raise DataError(f"{args.data}: the built-in corpus could not be prepared")
    accelerator.wait_for_everyone()
    train_set = PackedDataset(args.data, "train", seq_len)
    val_set = None
    if PackedDataset.fits(args.data, "val", seq_len):
        val_set = PackedDataset(args.data, "val", seq_len)
    else:
        accelerator.print(
            f"NO VALIDATION: the split is shorter than one sequence of {seq_len} tokens; prepare "
            "the data with a larger --val_fraction, or train with a smaller --max_seq_len"
        )
    if accelerator.is_local_main_process:
        train_set.scan()
    return train_set, val_set
