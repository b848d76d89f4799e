import pytest

from engine.sequence import SequenceGroup, check_request
from engine.types import EngineError, Finish, ModelInfo, PromptTooLong, Request, SamplingParams

INFO = ModelInfo(name="m", vocab_size=100, max_model_len=20, eos_token_ids=(99,), dtype="none", device="none")


def make(prompt: list[int], max_tokens: int = 4, **fields: object) -> Request:
    return Request(id="r", prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens), **fields)


def test_a_request_that_fits_to_the_token_is_taken() -> None:
    check_request(make([1] * 16, 4), INFO)
    with pytest.raises(PromptTooLong, match=r"16 tokens and 5 more.*holds 20"):
        check_request(make([1] * 16, 5), INFO)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (make([]), "prompt is empty"),
        (make([1, 100]), "outside the vocabulary"),
        (make([-1]), "outside the vocabulary"),
        (make([1], n=0), "n: must be at least 1"),
        (make([1], token_ceiling=0), "token_ceiling"),
        (make([1], max_tokens=0), "max_tokens: must be at least 1"),
    ],
)
def test_what_can_never_be_served_is_named(request_: Request, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        check_request(request_, INFO)


def test_a_group_ends_as_its_least_regular_choice() -> None:
    group = SequenceGroup(make([1], n=3), arrival=1, cache_root=b"")
    for sequence, finish in zip(group.sequences, (Finish.STOP, Finish.LENGTH, Finish.STOP), strict=True):
        sequence.finish = finish
    assert group.finish is Finish.LENGTH
    group.sequences[0].finish = Finish.ABORT
    assert group.finish is Finish.ABORT


def test_a_ceiling_allows_what_is_left_of_it() -> None:
    group = SequenceGroup(make([1], token_ceiling=3), arrival=1, cache_root=b"")
    assert (group.allowance, group.at_ceiling) == (3, False)
    group.completion = 3
    assert (group.allowance, group.at_ceiling) == (0, True)
    assert SequenceGroup(make([1]), arrival=1, cache_root=b"").allowance is None
