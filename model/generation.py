"""Continue a prompt, one token at a time."""

import torch
from torch import Tensor

from model.transformer import Transformer


@torch.inference_mode()
def generate(
    model: Transformer,
    prompt: list[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    stop_id: int | None = None,
) -> list[int]:
    """Ids that follow the prompt, sampled from the top_k likeliest at the given temperature.

    Args:
        prompt: at least one id. Only its last max_seq_len tokens are seen, and so with what is
            generated.
        stop_id: ends the continuation and is not part of it.

    Raises:
        ValueError: an empty prompt.
    """
    if not prompt:
        raise ValueError("an empty prompt: begin with at least the begin-of-document token")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive and finite, not {temperature}")
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}")
    device = model.tok_embeddings.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([prompt], device=device)
    for _ in range(max_new_tokens):
        logits = model(tokens[:, -model.config.max_seq_len :]).logits[0, -1].float()
        next_token = _sample(logits, temperature, top_k, generator)
        if next_token.item() == stop_id:
            break
        tokens = torch.cat((tokens, next_token[None]), dim=1)
    return tokens[0, len(prompt) :].tolist()


def _sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """One id, shape (1,), from logits of shape (vocab_size,)."""
    best, ids = logits.topk(min(top_k, logits.numel()))
    probabilities = torch.softmax(best / temperature, dim=-1)
    return ids[torch.multinomial(probabilities, 1, generator=generator)]
