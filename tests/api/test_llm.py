from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline import LLM, RequestOutput, SamplingParams
from paceline.errors import RequestError
from paceline.types import StepPlan, StepResult
from support.scripted_runner import ScriptedRunner, saying
from support.small_text import EOS, small_engine


def small_llm(**settings: Any) -> LLM:
    return LLM.from_engine(small_engine(**settings), seed=1)


def said(outputs: list[RequestOutput]) -> list[tuple[list[int], list[list[int]]]]:
    return [(o.prompt_token_ids, [choice.token_ids for choice in o.outputs]) for o in outputs]


def test_results_come_in_the_order_of_the_prompts() -> None:
    with small_llm() as llm:
        prompts = ["a longer prompt than the others", [1, 2], {"prompt": "b"}, {"prompt_token_ids": [7, 8, 9]}]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5))
        assert [o.prompt for o in outputs] == ["a longer prompt than the others", None, "b", None]
        assert [o.prompt_token_ids for o in outputs] == [[*b"a longer prompt than the others"], [1, 2], [98], [7, 8, 9]]
        assert all(o.finished and len(o.outputs[0].token_ids) <= 5 for o in outputs)


def test_one_prompt_needs_no_list() -> None:
    with small_llm() as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        as_text, as_ids = llm.generate("abc", params), llm.generate([*b"abc"], params)
        assert said(as_text) == said(as_ids) == said(llm.generate(["abc"], params))


def test_a_batch_says_what_its_members_say_alone() -> None:
    params = [SamplingParams(seed=i, max_tokens=8 + i, n=1 + i % 3, logprobs=2) for i in range(6)]
    prompts: list[Any] = [f"prompt number {i}" for i in range(6)]
    with small_llm(num_blocks=40) as llm:
        together = llm.generate(prompts, params)
        alone = [llm.generate(prompt, each)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert [o.outputs for o in together] == [o.outputs for o in alone]


def test_each_prompt_may_have_parameters_of_its_own() -> None:
    with small_llm() as llm:
        outputs = llm.generate(
            ["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3, ignore_eos=True)]
        )
        assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 3]
        with pytest.raises(ValueError, match="2 prompts, but 1 sampling_params"):
            llm.generate(["a", "b"], [SamplingParams()])


def test_one_bad_prompt_is_refused_before_anything_runs() -> None:
    runner = ScriptedRunner(saying(1, "x"))
    with LLM.from_engine(small_engine(runner)) as llm:
        with pytest.raises(RequestError, match="999"):
            llm.generate([[1], [999]])
        assert runner.num_steps == 0
        assert llm.generate([[1]])[0].outputs[0].text == "x"


@pytest.mark.parametrize(
    "prompt",
    [{"prompt": "a", "prompt_token_ids": [1]}, {}, {"text": "a"}, {"prompt": None}, [""], [[]], 5, [None], [5.5]],
)
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with small_llm() as llm:
        with pytest.raises(RequestError):
            llm.generate(prompt)
        assert llm.generate("works")[0].finished


def test_no_prompts_have_no_results() -> None:
    with small_llm() as llm:
        assert llm.generate([]) == []


def test_logprobs_add_up() -> None:
    with small_llm() as llm:
        (output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1))
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
    assert choice.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in choice.logprobs))
    assert all(len(entry.top_ids) == 2 and entry.rank == 1 for entry in choice.logprobs)
    assert output.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in output.prompt_logprobs] == [None, 98, 99]


def test_a_conversation_goes_through_the_template() -> None:
    runner = ScriptedRunner(lambda tokens: 65 if tokens[-1] != 65 else EOS)
    with LLM.from_engine(small_engine(runner)) as llm:
        conversation = [{"role": "user", "content": "hi"}]
        (output,) = llm.chat(conversation)
        assert output.outputs[0].text == "A"
        tokenizer = llm.get_tokenizer()
        assert tokenizer.decode(output.prompt_token_ids, skip_special=False) == "<start>user\nhi<end><start>assistant\n"
        assert [o.outputs[0].text for o in llm.chat([conversation, conversation])] == ["A", "A"]


def test_a_stream_joins_to_the_answer_and_can_be_left() -> None:
    with small_llm() as llm:
        params = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
        whole = llm.generate("abc", params)[0].outputs[0]
        assert "".join(delta.text for delta in llm.stream("abc", params)) == whole.text
        stream = llm.stream("abc", params)
        next(stream)
        stream.close()
        llm._open.engine.scheduler.check_idle()
        assert not llm._open.engine.has_work
        assert llm.generate("abc", params)[0].outputs[0] == whole


def test_prefixes_are_cached_until_they_are_forgotten() -> None:
    with small_llm() as llm:
        prompt, params = list(range(40)), SamplingParams(max_tokens=1)
        hits = [llm.generate([prompt], params)[0].num_cached_tokens for _ in range(2)]
        llm.reset_prefix_cache()
        assert [*hits, llm.generate([prompt], params)[0].num_cached_tokens] == [0, 32, 0]


def test_a_closed_llm_says_so() -> None:
    llm = small_llm()
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a")


class Interrupted:
    """A runner in which Ctrl-C arrives once, inside the given step."""

    def __init__(self, runner: ScriptedRunner, step: int) -> None:
        self._runner = runner
        self._step = step

    def execute(self, plan: StepPlan) -> StepResult:
        if self._runner.num_steps + 1 == self._step:
            self._step = -1
            raise KeyboardInterrupt
        return self._runner.execute(plan)


@pytest.mark.parametrize("step", [1, 2, 4])
def test_an_interrupt_comes_out_and_the_next_call_works(step: int) -> None:
    script = saying(3, "hello there")
    with LLM.from_engine(small_engine(Interrupted(ScriptedRunner(script), step))) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc", "def"])
        assert [o.outputs[0].text for o in llm.generate(["abc", "def"])] == ["hello there"] * 2
        assert not llm._open.engine.has_work


def test_open_streams_keep_their_tokens_apart() -> None:
    with small_llm() as llm:
        params = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)
        alone = {text: list(llm.stream(text, params)) for text in ("hi", "yo")}
        streams = {text: llm.stream(text, params) for text in alone}
        told: dict[str, list[Any]] = {text: [] for text in alone}
        told["hi"].append(next(streams["hi"]))
        batch = llm.generate(["hi", "other"], params)
        while any(streams.values()):
            for text, stream in list(streams.items()):
                delta = next(stream, None)
                if delta is None:
                    del streams[text]
                else:
                    told[text].append(delta)
        assert told == alone
        assert batch[0].outputs[0].text == "".join(delta.text for delta in alone["hi"])


def test_threads_share_an_llm() -> None:
    with small_llm(num_blocks=40) as llm:
        params = SamplingParams(seed=6, max_tokens=10)
        prompts = [f"prompt {i}" for i in range(12)]
        alone = said(llm.generate(prompts, params))
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda prompt: llm.generate(prompt, params)[0], prompts))
        assert said(results) == alone
        assert not llm._open.engine.has_work


def test_closing_gives_the_engine_back_at_once() -> None:
    llm = small_llm()
    llm.generate("hi", SamplingParams(max_tokens=2))
    engine = weakref.ref(llm._open.engine)
    llm.close()
    assert engine() is None


def test_a_stream_ends_with_its_llm() -> None:
    llm = small_llm()
    stream = llm.stream("hi", SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(stream)
