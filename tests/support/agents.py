"""Agents on the frameworks that users have, each with two tools; the reward is a property of the
last answer, so that a policy that can do nothing yet still earns different rewards.

Every agent is `run(task, base_url, api_key)`, as `--agent tests.support.agents:NAME` takes it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ragen_mega.data.types import Trajectory

PRICES = {"apple": 3, "pear": 4, "plum": 9}
QUESTION = "What do an apple and a pear cost together?"
MAX_TURNS = 3


def look_up(name: str) -> str:
    """Look up the price of a fruit.

    Args:
        name: name of the fruit
    """
    return str(PRICES.get(name, "unknown"))


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: first number
        b: second number
    """
    return str(a + b)


TOOLS = {"look_up": look_up, "add": add}
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in arguments.items()},
                "required": list(arguments),
            },
        },
    }
    for name, description, arguments in (
        ("look_up", "Look up the price of a fruit.", {"name": "string"}),
        ("add", "Add two numbers.", {"a": "integer", "b": "integer"}),
    )
]


def reward(text: str | None) -> float:
    return (sum(map(ord, text or "")) % 7) / 7


def call_tool(name: str, arguments: str) -> str:
    try:
        return TOOLS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__}"


def plain(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """The loop that people write with the `openai` package."""
    from openai import OpenAI

    with OpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": f"{QUESTION} ({task['seed']})"}]
        for _ in range(MAX_TURNS):
            reply = (
                client.chat.completions.create(model="policy", messages=messages, tools=SCHEMAS)
                .choices[0]
                .message
            )
            messages.append(reply)
            if not reply.tool_calls:
                break
            for call in reply.tool_calls:
                result = call_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return reward(reply.content)


async def streaming(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """An asynchronous agent that reads its answers as they are streamed."""
    from openai import AsyncOpenAI

    messages: list[Any] = [{"role": "user", "content": f"{QUESTION} ({task['seed']})"}]
    text = ""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            parts = await client.chat.completions.create(
                model="policy", messages=messages, stream=True
            )
            text = ""
            async for part in parts:
                if part.choices:
                    text += part.choices[0].delta.content or ""
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "Are you sure?"},
            ]
    return reward(text)


def sub_agent(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """A planner that hands a question to a worker, twice, and uses what it says."""
    from openai import OpenAI

    with OpenAI(base_url=base_url, api_key=api_key) as client:

        def ask(role: str, messages: list[Any]) -> str:
            chosen = client.chat.completions.create(model=role, messages=messages).choices[0]
            return chosen.message.content or ""

        plan: list[Any] = [
            {"role": "system", "content": "Plan."},
            {"role": "user", "content": f"{QUESTION} ({task['seed']})"},
        ]
        for fruit in ("apple", "pear"):
            said = ask("planner", plan)
            price = ask("worker", [{"role": "user", "content": f"Price of {fruit}?"}])
            plan += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": f"The worker says: {price}"},
            ]
        last = ask("planner", plan)
    return {"reward": reward(last), "success": reward(last) > 0.5}


def compacting(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """An agent that replaces its history by a summary of its own when it gets long."""
    from openai import OpenAI

    with OpenAI(base_url=base_url, api_key=api_key) as client:
        system = {"role": "system", "content": "You are thrifty."}
        messages: list[Any] = [system, {"role": "user", "content": f"{QUESTION} ({task['seed']})"}]
        text = ""
        for turn in range(4):
            if turn == 2:
                summary = {"role": "user", "content": f"Until now: {text[:20]}"}
                messages = [system, summary]
            text = (
                client.chat.completions.create(model="policy", messages=messages)
                .choices[0]
                .message.content
                or ""
            )
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "Go on."},
            ]
    return reward(text)


async def openai_agents(
    task: dict[str, Any], base_url: str, api_key: str, *, use_responses: bool = True
) -> float:
    """An agent on the OpenAI Agents SDK, which hands over to a second one; every other episode is
    streamed.
    """
    from agents import (
        Agent,
        MaxTurnsExceeded,
        ModelBehaviorError,
        OpenAIProvider,
        RunConfig,
        Runner,
        function_tool,
    )
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        provider = OpenAIProvider(openai_client=client, use_responses=use_responses)
        settings = RunConfig(model_provider=provider, tracing_disabled=True)
        agent = Agent(
            name="buyer",
            instructions="Use the tools.",
            tools=[function_tool(look_up), function_tool(add)],
            handoffs=[Agent(name="helper", instructions="Help.", model="policy")],
            model="policy",
        )
        given = (agent, f"{QUESTION} ({task['seed']})")
        try:
            if task["outcome_seed"] % 2:
                done = Runner.run_streamed(*given, max_turns=MAX_TURNS, run_config=settings)
                assert [event async for event in done.stream_events()]
            else:
                done = await Runner.run(*given, max_turns=MAX_TURNS, run_config=settings)
        except (MaxTurnsExceeded, ModelBehaviorError):
            return 0.0
    return reward(done.final_output)


async def openai_agents_chat(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """The same agent on chat completions."""
    return await openai_agents(task, base_url, api_key, use_responses=False)


def anthropic(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """The loop that people write with the `anthropic` package."""
    from anthropic import Anthropic

    tools = [
        {
            "name": schema["function"]["name"],
            "description": schema["function"]["description"],
            "input_schema": schema["function"]["parameters"],
        }
        for schema in SCHEMAS
    ]
    with Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": f"{QUESTION} ({task['seed']})"}]
        for _ in range(MAX_TURNS):
            with client.messages.stream(
                model="policy", max_tokens=100, messages=messages, tools=tools
            ) as events:
                reply = events.get_final_message()
            used = [block for block in reply.content if block.type == "tool_use"]
            if not used:
                break
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block.id,
                    "content": call_tool(block.name, json.dumps(block.input)),
                }
                for block in used
            ]
            messages += [
                {"role": "assistant", "content": reply.content},
                {"role": "user", "content": results},
            ]
    return reward("".join(block.text for block in reply.content if block.type == "text"))


def langgraph(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """A ReAct agent of LangGraph on LangChain's client."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.errors import GraphRecursionError
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    agent = create_react_agent(model, [tool(look_up), tool(add)])
    try:
        done = agent.invoke(
            {"messages": [("user", f"{QUESTION} ({task['seed']})")]},
            {"recursion_limit": 2 * MAX_TURNS + 1},
        )
    except GraphRecursionError:
        return 0.0
    return reward(done["messages"][-1].content)


def smolagents(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """An agent of smolagents that calls tools; its prompts take some 2,000 tokens."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(
        tools=[tool(look_up), tool(add)], model=model, max_steps=MAX_TURNS, verbosity_level=0
    )
    return reward(str(agent.run(f"{QUESTION} ({task['seed']})")))


def example(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | dict[str, Any]:
    """Answer as a model might that looks one price up, in any of the frameworks."""
    names = [tool["function"]["name"] for tool in tools]
    if "look_up" in names and messages[-1]["role"] == "user" and len(messages) < 3:
        return {"tool_calls": [{"name": "look_up", "arguments": {"name": "apple"}}]}
    if "final_answer" in names:
        return {"tool_calls": [{"name": "final_answer", "arguments": {"answer": "seven"}}]}
    return "It costs seven."


def check_logprobs(model_path: Path, trajectories: list[Trajectory], temperature: float) -> int:
    """Compare recorded log-probabilities of sampled tokens with transformers' log-probabilities
    under the weights that sampled them; returns their number.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    num_checked = 0
    for trajectory in trajectories:
        for start, end in trajectory.segments:
            tokens = torch.tensor([trajectory.tokens[start:end]])
            with torch.no_grad():
                logits = model(tokens).logits[0, :-1] / temperature
            exact = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            recorded = torch.tensor(trajectory.rollout_logprobs[start + 1 : end])
            mask = torch.tensor(trajectory.loss_mask[start + 1 : end])
            assert (exact - recorded)[mask].abs().max() < 1e-4
            num_checked += int(mask.sum())
    return num_checked
