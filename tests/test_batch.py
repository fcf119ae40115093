"""Texts that come and go become what each would be alone."""

from dataclasses import replace

import pytest
import torch
from small_model import opinionated

from data.tokenizer import Tokenizer
from inference.batch import STRETCH, Batch
from inference.continuation import Continuation, TooLongError
from inference.decoder import Decoder
from inference.generation import generate
from inference.sampling import Sampling
from tests.conftest import VOCAB_SIZE

CONTEXT = 120
SAMPLED = Sampling(temperature=1.5, top_k=0, seed=3)


@pytest.fixture(scope="module")
def model():
    return opinionated(VOCAB_SIZE, CONTEXT)


@pytest.fixture(scope="module")
def tokenizer(packed):
    return Tokenizer(packed / "tokenizer.model")


class Written(Continuation):
    """Remembers its tokens and what it delivered."""

    def __init__(self, tokenizer, prompt, n=None, sampling=SAMPLED, **options):
        self.tokens, self.pieces, self.reasons = [], [], []
        super().__init__(
            tokenizer, prompt, sampling, CONTEXT, deliver=self.note, max_new_tokens=n, **options
        )

    def take(self, token):
        self.tokens.append(token)
        super().take(token)

    def note(self, piece, reason):
        self.pieces.append(piece)
        self.reasons.append(reason)

    @property
    def text(self):
        return "".join(self.pieces)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def alone(model, prompt, n, sampling=SAMPLED, **options) -> list[int]:
    return generate(model, [prompt], n, sampling, slide=False, **options)[0]


def test_those_that_join_and_leave_become_what_they_would_be_alone(model, tokenizer):
    decoder = Decoder(model)
    wanted = [(30, 12), (5, 40), (50, 3), (1, 25), (64, 30)]
    texts = [
        Written(tokenizer, prompt, n, replace(SAMPLED, seed=seed))
        for seed, (prompt, (_, n)) in enumerate(
            zip(prompts(*[length for length, _ in wanted]), wanted, strict=True)
        )
    ]
    batch = Batch(decoder)
    batch.add(texts[:2])
    for _ in range(7):
        batch.step()
    batch.add(texts[2:4])  # the widest so far: more room is made
    for _ in range(5):
        batch.step()
    assert texts[0].finish_reason == texts[2].finish_reason == "length"
    assert batch.texts == [texts[1], texts[3]]
    batch.add(texts[4:])
    while batch.texts:
        batch.step()
    for text, (_, n) in zip(texts, wanted, strict=True):
        expected = alone(model, text.prompt, n, text.sampling)
        assert text.tokens == expected
        assert len({*expected}) > min(n, 5) - 1  # not the same token again and again
        assert text.text == tokenizer.decode([*tokenizer.encode("x"), *expected])[1:]


def test_after_all_have_left_others_can_come(model, tokenizer):
    batch = Batch(Decoder(model))
    for prompt in prompts(20, 9):
        text = Written(tokenizer, prompt, 6)
        batch.add([text])
        while batch.texts:
            batch.step()
        assert text.tokens == alone(model, prompt, 6)


def test_room_is_made_as_a_text_grows(model, tokenizer):
    decoder, (prompt,) = Decoder(model), prompts(3)
    batch, text = Batch(decoder), Written(tokenizer, prompt)
    batch.add([text])
    assert decoder.room == 3 + STRETCH < CONTEXT
    while batch.texts:
        batch.step()
    assert text.tokens == alone(model, prompt, CONTEXT - 3)
    assert decoder.room == CONTEXT


def test_who_is_cancelled_leaves_and_the_others_go_on(model, tokenizer):
    batch = Batch(Decoder(model))
    one, other = (Written(tokenizer, prompt, 20) for prompt in prompts(4, 6))
    batch.add([one, other])
    for _ in range(3):
        batch.step()
    one.cancel()
    batch.step()
    assert batch.texts == [other]
    while batch.texts:
        batch.step()
    assert len(one.pieces) == 3
    assert one.finish_reason == "cancelled"
    assert other.tokens == alone(model, other.prompt, 20)


def test_settings_of_one_text_are_not_the_others(model, tokenizer):
    first, second = prompts(8, 8)
    penalised = Sampling(temperature=0, repetition_penalty=1.9)
    texts = [
        Written(tokenizer, first, 15, penalised),
        Written(tokenizer, second, 15, Sampling(temperature=0)),
        Written(tokenizer, second, 15, next_ids=tokenizer.ids_with_space),
    ]
    batch = Batch(Decoder(model))
    batch.add(texts)
    while batch.texts:
        batch.step()
    assert texts[0].tokens == alone(model, first, 15, penalised)
    assert texts[0].tokens != alone(model, first, 15, Sampling(temperature=0))
    assert texts[1].tokens == alone(model, second, 15, Sampling(temperature=0))
    spaced = alone(model, second, 15, next_ids=[tokenizer.ids_with_space])
    assert texts[2].tokens == spaced != alone(model, second, 15)
    assert spaced[0] in tokenizer.ids_with_space


def test_a_text_ends_with_its_length_the_context_the_end_piece_or_a_stop_string(tokenizer):
    ids = tokenizer.encode("1 + 2 = 3; 2 + 2 = 4;")
    (prompt,) = prompts(CONTEXT - len(ids))

    def written(tokens, **options):
        text = Written(tokenizer, prompt, **options)
        for token in tokens:
            text.take(token)
        assert text.reasons.count(None) == len(text.reasons) - bool(text.finish_reason)
        return text.text, text.finish_reason, text.n_tokens

    whole = tokenizer.decode(ids)
    assert written(ids) == (whole, "length", len(ids))  # the context has no more room
    assert written(ids[:-1]) == (tokenizer.decode(ids[:-1]), None, len(ids) - 1)
    assert written(ids, n=4) == (tokenizer.decode(ids[:4]), "length", 4)
    assert written([*ids[:3], tokenizer.eos_id], n=4) == (tokenizer.decode(ids[:3]), "stop", 4)
    text, reason, n = written(ids, stop=("= 3;",))
    assert (text, reason) == ("1 + 2 ", "stop")
    assert n < len(ids)


def test_the_beginning_of_a_stop_string_is_text_where_the_rest_does_not_come(tokenizer):
    text = Written(tokenizer, [5], stop=("3; x",))
    for token in tokenizer.encode("2 = 3; "):
        text.take(token)
    assert text.text == "2 = "
    text.take(tokenizer.eos_id)
    assert text.text == "2 = 3; "


def test_a_prompt_that_fills_the_context_is_refused(tokenizer):
    Written(tokenizer, [5] * (CONTEXT - 1))
    with pytest.raises(TooLongError, match=r"120 tokens leave no room .* has 120"):
        Written(tokenizer, [5] * CONTEXT)
