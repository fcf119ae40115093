"""Import the weights of a Llama or Qwen3 model from another project.

python -m scripts.import_weights SOURCE out/imported/NAME

SOURCE is a Hugging Face folder, or a state dict (.pth, .pt, .bin, .safetensors) with the parameter
names of Llama, llama2.c, MiniMind or Hugging Face.
"""

from pathlib import Path

from lm.common.errors import UsageError, one_line_errors
from lm.common.parser import OneLineParser


@one_line_errors("import_weights", UsageError, OSError)
def main(argv: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m scripts.import_weights", description=__doc__)
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="folder or file to read")
    add("out", type=Path, metavar="OUT", help="folder to write")
    add("--tokenizer", type=Path, help="tokenizer.model or .json (default: in or beside SOURCE)")
    add("--n_heads", type=int, help="number of query heads (only for a state dict)")
    add("--num_experts_per_tok", type=int, help="experts of a token (only for a state dict)")
    eps = "default: 1e-5; with norms of queries and keys, 1e-6"
    add("--norm_eps", type=float, help=f"epsilon of RMSNorm (only for a state dict; {eps})")
    theta = "default: 10000; with norms of queries and keys, 1e6"
    add("--rope_theta", type=float, help=f"base of RoPE (only for a state dict; {theta})")
    add("--max_seq_len", type=int, help="context length (default: that of SOURCE, or 2048)")
    add("--overwrite", action="store_true", help="replace an older import in OUT")
    args = parser.parse_args(argv)

    from lm.formats.import_weights import import_weights  # importing torch takes seconds

    print(import_weights(**vars(args)))


if __name__ == "__main__":
    main()
