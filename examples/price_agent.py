r"""An agent on the OpenAI SDK: it looks two prices up and adds them with its tools.

`run` is the agent. `ideal` answers as a model that knows how, for the warm start of a small model.
In this folder, with the extra `agents`:

    ragen-mega train --agent price_agent:run --agent-example price_agent:ideal --no-think \
        --warm-start-skill 0.7 --warm-start-first-turn-steps 0 --warm-start-steps 600 \
        --warm-start-trajectories 2048 \
        --advantage-estimator grpo --filter-strategy none \
        --max-context-length 640 --max-response-length 48 --max-turns 8 \
        --num-groups 16 --group-size 8 --minibatch-size 128 --num-steps 100 --lr 3e-4 \
        --eval-interval 50 --eval-prompts 64 --eval-samples 4
"""

import json
import random

FRUITS = ("apple", "pear", "plum", "fig", "kiwi", "lemon", "mango", "cherry")


def tool(name: str, **parameters: str) -> dict:
    """Return the schema of a tool whose parameters have these types."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("search", fruit="string"), tool("add", a="integer", b="integer")]


def run(task: dict, client) -> float:
    """Play one episode; the reward is 1 for the right sum."""
    draw = random.Random(task["seed"])
    prices = {fruit: draw.randint(1, 9) for fruit in FRUITS}
    first, second = draw.sample(FRUITS, 2)
    tools = {"search": lambda fruit: prices[fruit], "add": lambda a, b: int(a) + int(b)}
    messages = [{"role": "user", "content": f"{first} and {second}?"}]
    for _ in range(6):
        reply = client.chat.completions.create(model="buyer", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            try:
                result = tools[call.function.name](**json.loads(call.function.arguments))
            except (KeyError, TypeError, ValueError):
                result = "error"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        if not message.tool_calls:
            return float(message.content.strip() == str(prices[first] + prices[second]))
    return 0.0


def ideal(messages: list[dict], tools: list[dict]) -> str | dict:
    """Return the next message of a model that can do the task."""
    fruits = messages[0]["content"].rstrip("?").split(" and ")
    results = [message["content"] for message in messages if message["role"] == "tool"]
    if len(results) < 2:
        return {"tool_calls": [{"name": "search", "arguments": {"fruit": fruits[len(results)]}}]}
    if len(results) == 2:
        a, b = map(int, results)
        return {"tool_calls": [{"name": "add", "arguments": {"a": a, "b": b}}]}
    return results[2]
