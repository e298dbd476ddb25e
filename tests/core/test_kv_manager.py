import pytest

from paceline.core.kv_manager import KvManager
from paceline.core.request import Request
from paceline.types import TokenRules


def request(tokens: list[int], salt: str = "", **rules: int) -> Request:
    return Request("r", tokens, TokenRules(**rules), cache_salt=salt)


def compute(kv: KvManager, sequence: Request, up_to: int | None = None) -> None:
    """Pretend that the runner computed the sequence, in full or in part."""
    sequence.num_computed = len(sequence.tokens) if up_to is None else up_to
    kv.publish(sequence)


def started(kv: KvManager, tokens: list[int], salt: str = "", **rules: int) -> Request:
    sequence = request(tokens, salt, **rules)
    assert kv.start(sequence, reserve=0)
    return sequence


def tokens_cached_for(kv: KvManager, tokens: list[int], salt: str = "", **rules: int) -> int:
    return kv.match(request(tokens, salt, **rules))[1]


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "expected"), [(1, 64, 1), (64, 64, 1), (65, 64, 2), (3200, 64, 50), (7, 1, 7)]
)
def test_tokens_need_so_many_blocks(num_tokens: int, block_size: int, expected: int) -> None:
    assert KvManager(1, block_size).blocks_for(num_tokens) == expected


def test_three_prompts_that_begin_alike_share_blocks() -> None:
    kv = KvManager(128, 64)
    first = started(kv, [1] * 3200)
    assert len(first.blocks) == kv.num_used == 50
    compute(kv, first)
    second = started(kv, [1] * 1600 + [2] * 1600)
    assert (second.num_computed, kv.num_used) == (25 * 64, 75)
    compute(kv, second)
    third = started(kv, [1] * 1600 + [3] * 1600)
    assert (third.num_computed, kv.num_used) == (25 * 64, 100)
    assert first.blocks[:25] == second.blocks[:25] == third.blocks[:25]


@pytest.mark.parametrize("block_size", [1, 4, 32, 64])
def test_at_least_one_token_of_a_cached_prompt_is_left_to_compute(block_size: int) -> None:
    kv = KvManager(8, block_size)
    tokens = list(range(3 * block_size))
    compute(kv, started(kv, tokens))
    assert tokens_cached_for(kv, tokens) == 2 * block_size
    assert tokens_cached_for(kv, [*tokens, 7]) == 3 * block_size
    assert tokens_cached_for(kv, tokens[:-1]) == (3 * block_size - 2) // block_size * block_size
    assert tokens_cached_for(kv, tokens[:1]) == 0


def test_only_full_computed_blocks_are_found() -> None:
    kv = KvManager(4, 4)
    sequence = started(kv, list(range(12)))
    assert tokens_cached_for(kv, list(range(12))) == 0
    compute(kv, sequence, up_to=7)
    assert tokens_cached_for(kv, list(range(12))) == 4
    compute(kv, sequence, up_to=8)
    assert tokens_cached_for(kv, list(range(12))) == 8


def test_output_is_cached_like_the_prompt() -> None:
    kv = KvManager(4, 4)
    sequence = started(kv, [1, 2, 3])
    sequence.tokens += [4, 5, 6]
    assert kv.grow(sequence, 6, ahead=0) == (1,)
    compute(kv, sequence, up_to=5)
    kv.free(sequence)
    assert tokens_cached_for(kv, [1, 2, 3, 4, 5]) == 4


def test_the_same_tokens_after_another_beginning_are_not_a_hit() -> None:
    kv = KvManager(8, 2)
    compute(kv, started(kv, [1, 2, 3, 4, 5, 6]))
    assert tokens_cached_for(kv, [3, 4, 5, 6, 0]) == 0
    assert tokens_cached_for(kv, [1, 2, 5, 6, 0]) == 2


def test_requests_share_only_under_the_same_salt() -> None:
    kv = KvManager(8, 2)
    compute(kv, started(kv, [1, 2, 3], salt="ours"))
    assert tokens_cached_for(kv, [1, 2, 3], salt="ours") == 2
    assert tokens_cached_for(kv, [1, 2, 3], salt="theirs") == 0
    assert tokens_cached_for(kv, [1, 2, 3]) == 0
    assert tokens_cached_for(kv, [1, 2, 3], salt="\ud800") == 0


def test_a_request_for_prompt_logprobs_uses_no_cached_prefix_but_provides_one() -> None:
    kv = KvManager(8, 2)
    compute(kv, started(kv, [1, 2, 3], prompt_logprobs=0))
    assert tokens_cached_for(kv, [1, 2, 3], prompt_logprobs=0) == 0
    assert tokens_cached_for(kv, [1, 2, 3]) == 2


def test_without_prefix_caching_nothing_is_kept() -> None:
    kv = KvManager(8, 2, enable_prefix_caching=False)
    sequence = started(kv, [1, 2, 3])
    compute(kv, sequence)
    kv.free(sequence)
    assert (tokens_cached_for(kv, [1, 2, 3]), kv.num_cached) == (0, 0)


def test_freed_blocks_stay_cached_until_their_room_is_needed_the_deepest_going_first() -> None:
    kv = KvManager(4, 2)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    sequence = started(kv, tokens)
    compute(kv, sequence)
    kv.free(sequence)
    assert (kv.num_used, kv.num_cached, tokens_cached_for(kv, tokens)) == (0, 3, 6)
    started(kv, [9] * 3)
    assert tokens_cached_for(kv, tokens) == 4


def test_requests_share_only_with_the_same_adapter() -> None:
    kv = KvManager(8, 2)
    tokens = [1, 2, 3]

    def cached(adapter: str | None, salt: str = "") -> int:
        return kv.match(Request("r", tokens, TokenRules(), cache_salt=salt, adapter=adapter))[1]

    sequence = Request("r", tokens, TokenRules(), adapter="ours")
    assert kv.start(sequence, reserve=0)
    compute(kv, sequence)
    assert cached("ours") == 2
    assert (cached("theirs"), cached(None), cached("")) == (0, 0, 0)
    # Neither can be spelt as the other.
    assert (cached("ours", "salt"), cached(None, "ours"), cached("\ud800")) == (0, 0, 0)


def test_a_start_takes_all_it_needs_or_nothing() -> None:
    kv = KvManager(4, 2)
    sequence = request([1] * 7)
    assert not kv.start(sequence, reserve=1)
    assert (kv.num_used, sequence.blocks) == (0, [])
    assert kv.start(sequence, reserve=0)
    assert kv.num_used == 4


def test_a_cached_block_is_not_counted_as_room_for_the_request_that_uses_it() -> None:
    kv = KvManager(3, 2)
    first = started(kv, [1, 2, 3, 4])
    compute(kv, first)
    kv.free(first)
    # Two of three blocks are cached: two tokens more need the third and one that does not exist.
    assert not kv.start(request([1, 2, 3, 4, 5, 6, 7]), reserve=0)
    assert (kv.num_used, kv.num_cached) == (0, 2)
    assert started(kv, [1, 2, 3, 4, 5, 6]).num_computed == 4


def test_growth_brings_what_is_needed_and_more_only_if_it_is_there() -> None:
    kv = KvManager(4, 2)
    sequence = started(kv, [1, 2])
    assert kv.grow(sequence, 2, ahead=2) == ()
    assert kv.grow(sequence, 3, ahead=1) == (1, 2)
    assert kv.grow(sequence, 7, ahead=1) == (3,)
    assert kv.grow(sequence, 9, ahead=0) is None
    assert sequence.blocks == [0, 1, 2, 3]


def test_a_reset_empties_the_cache_and_leaves_running_requests_alone() -> None:
    kv = KvManager(8, 2)
    gone, running = started(kv, [1, 2, 3]), started(kv, [5, 6, 7])
    compute(kv, gone)
    compute(kv, running)
    kv.free(gone)
    kv.reset()
    assert (tokens_cached_for(kv, [1, 2, 3]), tokens_cached_for(kv, [5, 6, 7])) == (0, 0)
    assert (kv.num_cached, kv.num_used) == (0, 2)
    kv.free(running)
    assert kv.num_used == 0
