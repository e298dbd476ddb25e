"""Whether a real model calls a tool: asked freely, and where a call is required.

    python benchmarks/tool_call.py MODEL

MODEL has a chat template that shows tools, for instance Qwen2.5-Coder-0.5B-Instruct. Prints each answer and how often
the right function was called with the right arguments; exits with 1 if one of the required calls was not.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field

from paceline import LLM, SamplingParams
from paceline.engine.model_info import ModelInfo
from paceline.engine.prompts import thinking_after
from paceline.engine.tools import ToolChoice, parse_tools, required_calls
from paceline.text.answer_parser import AnswerParser, Thinking

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
]
QUESTIONS = [
    ("What is the weather in Paris right now?", "get_weather", {"city": "Paris"}),
    ("How warm is it in Tokyo, in celsius?", "get_weather", {"city": "Tokyo"}),
    ("Please add 17 and 25.", "add", {"a": 17, "b": 25}),
    ("What is 1234 plus 4321?", "add", {"a": 1234, "b": 4321}),
]


@dataclass
class Call:
    name: str
    arguments: str = ""


@dataclass
class Told:
    content: str = ""
    calls: list[Call] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a real model for tool calls.")
    parser.add_argument("model")
    args = parser.parse_args()
    missed = 0
    with LLM(args.model) as llm:
        info = llm._open.info
        print(f"{args.model}: calls are written as {info.formats.tools and info.formats.tools.name}")
        for choice in ("auto", "required"):
            right = sum(ask(llm, info, choice, *question) for question in QUESTIONS)
            print(f"tool_choice {choice}: {right} of {len(QUESTIONS)} calls as expected")
            missed += (len(QUESTIONS) - right) if choice == "required" else 0
    sys.exit(1 if missed else 0)


def ask(llm: LLM, info: ModelInfo, kind: str, question: str, name: str, expected: dict[str, object]) -> bool:
    choice = parse_tools(TOOLS, kind, False)
    messages = [{"role": "user", "content": question}]
    form = required_calls(info, choice)
    params = SamplingParams(temperature=0, max_tokens=128, structured_outputs=form, skip_special_tokens=False)
    [output] = llm.chat(messages, params, tools=list(choice.tools), use_tqdm=False)
    told = take_apart(info, choice, output.outputs[0].text, thinking_after(info, output.prompt_token_ids))
    call = told.calls[0] if told.calls else None
    print(f"  {question!r} -> {call or told.content!r}")
    if call is None or call.name != name:
        return False
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return False
    return all(arguments.get(key) == value for key, value in expected.items())


def take_apart(info: ModelInfo, choice: ToolChoice, text: str, thinking: Thinking) -> Told:
    parser = AnswerParser(
        reasoning=info.formats.reasoning,
        thinking=thinking,
        tools=info.formats.tools,
        names=choice.names,
        parallel=choice.parallel,
    )
    told = Told()
    for piece in [*parser.push(text), *parser.finish()]:
        told.content += piece.content
        if piece.name is not None:
            told.calls.append(Call(piece.name))
        elif piece.call is not None:
            told.calls[piece.call].arguments += piece.arguments
    return told


if __name__ == "__main__":
    main()
