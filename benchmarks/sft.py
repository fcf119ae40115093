"""Compare the speed of fine-tuning with TRL's SFTTrainer: same conversations, same model, bf16.

    python -m benchmarks.sft --data out/data/builtin-chat --run out/runs/NAME

TRL must be installed beside this repository's packages: `python -m pip install trl==1.16.0 -c
requirements.txt`. The two programs take turns. TRL pads the conversations of a step, which have
similar lengths. A speed is the number of tokens of conversations in a mean step, without padding,
divided by the median time of a step.
"""

import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from statistics import median

import torch

from benchmarks.cli import heading, new_parser, spread
from lm.common.errors import UsageError, one_line_errors, stop_in_order
from lm.data.conversation_set import ConversationRows, ConversationSet
from lm.storage.weights import load_trained
from lm.training.arguments import SFTArguments
from lm.training.measurement import measure
from model import IGNORE_INDEX
from train_sft_accelerate import train

PROGRAM = "benchmarks.sft"
CONVERSATIONS = 16  # in a step of TRL; a step of this repository has about as many tokens


def main(argv: list[str] | None = None) -> None:
    stop_in_order()
    parser = new_parser(PROGRAM, __doc__)
    parser.add_argument("--data", required=True, help="prepared conversations")
    parser.add_argument("--run", required=True, help="the model to fine-tune")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each program")
    parser.add_argument("--steps", type=int, default=24, help="steps of TRL in a turn")
    with one_line_errors(PROGRAM, UsageError), tempfile.TemporaryDirectory() as folder:
        args = parser.parse_args(argv)
        print(f"{heading(PROGRAM, argv)}\n", flush=True)
        exported, ratios = f"{folder}/exported", []
        export = [sys.executable, "-m", "scripts.export_hf", args.run, exported]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
        seq_len = load_trained(args.run).model.config.max_seq_len
        rows = ConversationRows(args.data, "train", seq_len)
        tokens = CONVERSATIONS * rows.lengths.mean()  # in a step of TRL
        n_rows = max(1, round(tokens / rows.tokens_per_sample))
        flags = {"data": args.data, "init_from": args.run, "batch_size": n_rows}
        flags |= {"compile": "on", "local_rank": None}
        for number in range(1, args.rounds + 1):
            ours = n_rows * rows.tokens_per_sample
            ours /= measure(train, SFTArguments, flags, (), seconds=100).step
            theirs = tokens / seconds_of_trl(args, exported, seq_len, f"{folder}/{number}")
            ratios.append(ours / theirs)
            print(f"round {number}: {ours:,.0f} tokens/s, TRL {theirs:,.0f}", flush=True)
        print(f"this repository is {spread(ratios, '.2f')} times as fast")


def seconds_of_trl(args, exported: str, seq_len: int, folder: str) -> float:
    """Return the median seconds of a step of SFTTrainer, without the first steps."""
    import datasets
    import transformers
    import trl

    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *parts, **names):
            ends.append(time.perf_counter())

    conversations = ConversationSet(args.data, "train", seq_len)
    settings = trl.SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=CONVERSATIONS,
        train_sampling_strategy="group_by_length",
        gradient_checkpointing=False,
        max_length=None,
        max_steps=args.steps,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(
        exported,
        args=settings,
        train_dataset=datasets.Dataset.from_list([in_trls_form(x) for x in conversations]),
        callbacks=[Clock()],
    )
    trainer.train()
    return median([after - before for before, after in pairwise(ends)][args.steps // 6 :])


def in_trls_form(conversation: tuple) -> dict[str, list[int]]:
    """Return the tokens of a conversation, with 1 for each token that counts in the loss."""
    tokens, targets = conversation
    ids = [*tokens.tolist(), int(targets[-1])]  # the last token is only a target
    return {"input_ids": ids, "completion_mask": [0, *(targets != IGNORE_INDEX).int().tolist()]}


if __name__ == "__main__":
    main()
