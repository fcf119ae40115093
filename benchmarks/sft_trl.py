"""Run TRL's `SFTTrainer` for `benchmarks.sft`, in another Python, which has TRL installed.
This file imports no other module of the repository.

    PYTHON -m benchmarks.sft_trl MODEL CONVERSATIONS.jsonl OUT BATCH_SIZE EPOCHS WAY

These are the settings of a careful user on a CPU: bf16, loss of the answers only, no recomputation.
"""

import json
import sys

# Ways to reduce padding. By default, a batch is padded to its longest conversation.
WAYS = {
    "in random order": {},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    # TRL recommends FlashAttention for this. With other attention kernels, transformers builds
    # a mask that keeps the conversations apart.
    "padding-free": {"padding_free": True, "max_length": None},
}


def main(model: str, conversations: str, out: str, batch_size: str, epochs: str, way: str) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class SayStep(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others):
            if "loss" in logs:  # the last log line sums up the run and has no "loss"
                step = f"step {state.global_step}/{state.max_steps}"
                print(f"{step} loss {logs['loss']:.4f}", flush=True)

    settings = SFTConfig(
        output_dir=out,
        per_device_train_batch_size=int(batch_size),
        num_train_epochs=int(epochs),
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **WAYS[way],
    )
    with open(conversations, encoding="utf-8") as lines:
        turns = [json.loads(line)["conversations"] for line in lines]
    rows = [{"prompt": each[:-1], "completion": each[-1:]} for each in turns]
    data = Dataset.from_list(rows)
    SFTTrainer(model=model, args=settings, train_dataset=data, callbacks=[SayStep()]).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
