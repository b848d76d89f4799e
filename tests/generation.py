"""Runs requests through the engine's core without a process, and the same through transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.core import EngineCore
from engine.types import AdapterRef, Request, SamplingParams, TokenLogprob


def greedy(
    name: str, prompt: Sequence[int], tokens: int, *, adapter: AdapterRef | None = None, logprobs: int | None = None
) -> Request:
    """A request for exactly `tokens` most likely tokens."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    return Request(id=name, prompt=list(prompt), sampling=sampling, adapter=adapter)


def run(
    core: EngineCore, requests: Sequence[Request], *, apart: int = 0
) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprob]]]:
    """Tokens and logprobs of each request; they arrive `apart` steps apart, so prefills and decodes mix."""
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    logprobs: dict[str, list[TokenLogprob]] = {request.id: [] for request in requests}
    waiting = list(requests)
    steps = 0
    while True:
        while waiting and (apart == 0 or steps % apart == 0):
            core.add(waiting.pop(0))
            if apart:
                break
        output = core.step()
        steps += 1
        if output is None and not waiting:
            break
        for update in output.updates if output is not None else ():
            assert update.error is None, update.error
            for delta in update.deltas:
                tokens[update.request_id] += delta.token_ids
                logprobs[update.request_id] += delta.logprobs or []
    core.check_integrity()
    return tokens, logprobs


@torch.inference_mode()
def transformers_greedy(model: Any, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[torch.Tensor]]:
    """The same by transformers (or PEFT): tokens, and the logits [vocab] each was taken from."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), [logits[0] for logits in out.logits]


@torch.inference_mode()
def transformers_greedy_batch(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """The tokens for many prompts, padded on the left in groups of like length: a third of the time."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: dict[int, list[int]] = {}
    for first in range(0, len(order), 6):
        group = order[first : first + 6]
        width = max(len(prompts[index]) for index in group)
        ids = torch.tensor([[0] * (width - len(prompts[index])) + list(prompts[index]) for index in group])
        mask = torch.tensor([[0] * (width - len(prompts[index])) + [1] * len(prompts[index]) for index in group])
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        found |= zip(group, out[:, width:].tolist(), strict=True)
    return [found[index] for index in range(len(prompts))]
