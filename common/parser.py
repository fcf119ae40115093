"""The argument parser of every program: a mistake is one line, with a guess at what was meant."""

import argparse
import difflib
import sys

from common.errors import UsageError

LAUNCHER_FLAGS = (
    *("--num_processes", "--mixed_precision", "--main_process_port", "--config_file"),
    *("--multi_gpu", "--use_deepspeed", "--deepspeed_config_file", "--cpu"),
    *("--num_machines", "--machine_rank", "--main_process_ip"),
)
DEEPSPEED_LAUNCHER_FLAGS = (
    *("--num_gpus", "--num_nodes", "--hostfile", "--include", "--exclude", "--no_local_rank"),
    *("--master_addr", "--master_port", "--node_rank", "--no_ssh"),
)
ELSEWHERE = {  # flags, and what other programs call them, where the spelling does not tell
    "accumulation_steps": "grad_accum",
    "batch_size": "bs per_device_train_batch_size",
    "dim": "hidden_size d_model n_embd",
    "dtype": "precision amp bf16 fp16 mixed_precision",
    "epochs": "num_train_epochs",
    "grad_clip": "max_grad_norm",
    "hidden_dim": "intermediate_size ffn_dim",
    "learning_rate": "lr max_lr",
    "gradient_checkpointing": "activation_checkpointing recompute",
    "init_from": "from_weight pretrained_model",
    "log_with": "report_to use_wandb wandb",
    "max_new_tokens": "max_length length n_predict",
    "max_seq_len": "block_size context_length ctx",
    "max_steps": "iters",
    "n_heads": "num_attention_heads",
    "n_layers": "depth",
    "num_samples": "num_return_sequences",
    "out_dir": "output save_dir",
    "resume": "resume_from_checkpoint",
    "weight_decay": "wd",
}
HINTS = {  # where the answer is no flag of the same program
    "vocab_size": "the vocabulary comes with the data: "
    'PREPARE_FLAGS="--vocab_size N" bash run_accelerate.sh, or scripts.prepare_data --vocab_size N',
    "text_column": "it is named where text is prepared: "
    'PREPARE_FLAGS="--text_column NAME" bash run_accelerate.sh, or scripts.prepare_data',
    "skip_bad_lines": "it is told where text is prepared: "
    "PREPARE_FLAGS=--skip_bad_lines bash run_accelerate.sh, or scripts.prepare_data",
    **dict.fromkeys(
        ("deepspeed", "deepspeed_config"),
        "the launcher is told: accelerate launch --use_deepspeed "
        "--deepspeed_config_file ds_config.json, or --config_file accelerate_config.yaml",
    ),
    "local_rank": "the deepspeed launcher appends it: use accelerate launch here, or deepspeed "
    "--no_local_rank",
}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves descriptions as they are and names every default that the help text does not."""

    def _get_help_string(self, action: argparse.Action) -> str:
        named = "default" in action.help or action.default in (None, argparse.SUPPRESS, [])
        named = named or action.default is False  # of a switch, which is off unless given
        return action.help if named else f"{action.help} (default: %(default)s)"


class UnlessGiven(argparse.Action):
    """What a flag means alone, if that is nothing, leaves what was given before as it is."""

    def __call__(self, parser, namespace, value, option_string=None):
        if value or not getattr(namespace, self.dest, None):
            setattr(namespace, self.dest, value)


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are a UsageError, with a guess at what was meant."""

    def __init__(self, **settings):
        super().__init__(**{"formatter_class": HelpFormatter} | settings)

    def error(self, message: str):
        raise UsageError(f"{message} (see --help)")

    def parse_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else list(args)
        values, unknown = self.parse_known_args(words, namespace)
        found, at = [], -1
        for word in unknown:
            before_it, at = at, words.index(word, at + 1 if word in words[at + 1 :] else 0)
            before = words[at - 1] if at else ""
            follows = bool(found) and at == before_it + 1  # another unknown one: perhaps its value
            if word.startswith("-") or not follows:
                found.append((word, self._guess(word, before)))
        if len(found) == 1:
            self.error(f"unrecognized argument {found[0][0]}{found[0][1]}")
        if found:
            told = (word + (f" ({hint[2:]})" if hint else "") for word, hint in found)
            self.error(f"unrecognized arguments: {', '.join(told)}")
        return values

    def _guess(self, unknown: str, before: str) -> str:
        """What may have been meant by this word, `before` being the one in front of it."""
        word = unknown.partition("=")[0]
        flags = {name: action for action in self._actions for name in action.option_strings}
        if word in LAUNCHER_FLAGS:
            return ": it belongs to accelerate launch, before the name of the script"
        if word in DEEPSPEED_LAUNCHER_FLAGS:
            return ": it belongs to the deepspeed launcher, before the name of the script"
        if not word.startswith("-"):
            return self._guess_of_value(word, before, flags)
        name = word.lstrip("-").replace("-", "_")
        if name in HINTS:
            return f": {HINTS[name]}"
        for ours, theirs in ELSEWHERE.items():
            if name in theirs.split() and f"--{ours}" in flags:
                return f": did you mean --{ours}?"
        # Without the dashes, which would make any two short flags look alike.
        names = [flag[2:] for flag in flags if flag.startswith("--") and flag != "--help"]
        close = difflib.get_close_matches(name, names, n=1)
        return f": did you mean --{close[0]}?" if close else ""

    @staticmethod
    def _guess_of_value(word: str, before: str, flags: dict[str, argparse.Action]) -> str:
        off = f"--no-{before.removeprefix('--')}"
        if f"--{word}" in flags:
            return f": did you mean --{word}?"
        if off in flags:
            return f": {before} takes no value, {off} switches it off"
        if before in flags and flags[before].nargs == 0:
            return f": {before} takes no value"
        return f": text is given as DATA={word} or --data {word}" if "--data" in flags else ""


def is_text(typed: str) -> bool:
    """Not of what was typed as bytes that are no UTF-8, nor of half a surrogate pair in JSON."""
    return not any("\ud800" <= character <= "\udfff" for character in typed)
