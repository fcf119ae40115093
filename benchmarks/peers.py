"""Peers: models of other projects, with the training step of the projects' own trainers.

Weights and AdamW's moments are fp32, autocast is used for bf16, gradients are clipped, as in
`transformers.Trainer(bf16=True)` and in `litgpt pretrain --precision bf16-mixed`. The loops of
these trainers are left out, because they would only make the peers slower.
"""

import itertools

import torch
from torch import Tensor, nn

from benchmarks.work import Work
from lm.engine.deepspeed_config import ADAM_EPS
from lm.engine.hardware import keep_freed_memory, set_threads
from lm.formats.config_json import config_json_of
from lm.training.arguments import TrainingArguments
from lm.training.optimizer import parameter_groups

OURS = TrainingArguments()  # the defaults of a run that starts from existing weights


def build_transformers(work: Work) -> nn.Module:
    """Return a `transformers.LlamaForCausalLM` with random weights, and no key/value cache, as in
    transformers' Trainer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = config_json_of(work.config, "float32", bos_id=1, eos_id=2)
    return LlamaForCausalLM(LlamaConfig(**settings, use_cache=False))


def transformers_loss(model: nn.Module, tokens: Tensor, targets: Tensor, precision) -> Tensor:
    """Return the loss of transformers, which does not shift targets passed as `shift_labels`."""
    with precision:
        return model(input_ids=tokens, labels=targets, shift_labels=targets).loss


def build_litgpt(work: Work) -> nn.Module:
    """Return a `litgpt.model.GPT` in the shape of Llama, with random, tied weights."""
    from litgpt.config import Config
    from litgpt.model import GPT

    config = work.config
    model = GPT(
        Config(
            name="llama-like",
            block_size=config.max_seq_len,
            vocab_size=config.vocab_size,
            padded_vocab_size=config.vocab_size,  # litgpt's default is rounded up
            n_layer=config.n_layers,
            n_embd=config.dim,
            n_head=config.n_heads,
            n_query_groups=config.n_kv_heads,
            rotary_percentage=1.0,
            rope_base=int(config.rope_theta),
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            norm_eps=config.norm_eps,
            mlp_class_name="LLaMAMLP",
            intermediate_size=config.hidden_dim,
        )
    )
    model.apply(model._init_weights)
    model.lm_head.weight = model.transformer.wte.weight
    return model


def litgpt_loss(model: nn.Module, tokens: Tensor, targets: Tensor, precision) -> Tensor:
    """Return the loss of litgpt's pretraining script, in which Fabric casts the logits to fp32."""
    from litgpt.utils import chunked_cross_entropy

    with precision:
        logits = model(tokens)  # (B, T, vocab_size)
    return chunked_cross_entropy(logits.float(), targets)


PEERS = {  # name → (function that builds the model, function that returns its mean loss)
    "transformers": (build_transformers, transformers_loss),
    "litgpt": (build_litgpt, litgpt_loss),
}


class PeerStep:
    """One optimizer step of a peer's model.

    Args:
        peer: a key of PEERS.
        our_allocator: True keeps freed memory, as the training script does on a CPU with glibc.
    """

    engine = "single process"
    expected = None  # there is no estimate of its memory

    def __init__(self, peer: str, work: Work, compiled: bool, our_allocator: bool):
        set_threads()
        if our_allocator:
            keep_freed_memory()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        build, self._loss_of = PEERS[peer]
        self._work = work
        torch.manual_seed(OURS.seed)
        model = build(work).to(self.device).train()
        self._weights = list(model.parameters())
        # Our settings, but one learning rate for all layers: rates do not change a step's time.
        # The fused AdamW is the fastest in PyTorch.
        self._optimizer = torch.optim.AdamW(
            parameter_groups(model, OURS.weight_decay),
            lr=OURS.learning_rate,
            betas=(OURS.beta1, OURS.beta2),
            eps=ADAM_EPS,
            fused=True,
        )
        self._model = torch.compile(model) if compiled else model
        self._batches = itertools.cycle(work.batches(self.device))
        self._loss: Tensor | None = None

    def step(self) -> None:
        autocast = self._work.dtype == "bfloat16"
        precision = torch.autocast(self.device.type, torch.bfloat16, enabled=autocast)
        for _ in range(self._work.accumulation_steps):
            tokens, targets = next(self._batches)
            loss = self._loss_of(self._model, tokens, targets, precision)
            (loss / self._work.accumulation_steps).backward()
            self._loss = loss.detach()
        nn.utils.clip_grad_norm_(self._weights, OURS.grad_clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def loss(self) -> float:
        """Return the loss of the last micro-batch, after waiting for the device."""
        return float(self._loss)
