r"""An agent on the OpenAI SDK that asks its way to a code with a tool for models without tools: the
answer `ask NAME` calls it, any other answer is taken for the code.

A pretrained model learns it from rewards alone. In this folder, with the extra `agents` and after
`ragen-mega fetch smollm2` in it:

    ragen-mega train --agent lookup_agent:run --agent-example lookup_agent:ideal \
        --load models/smollm2 --bf16 --no-think --prompt-style compact \
        --max-response-length 16 --max-context-length 640 --max-turns 7 \
        --advantage-estimator dr_grpo --filter-strategy none --entropy-coef 0 \
        --num-groups 8 --group-size 8 --minibatch-size 64 --max-tokens-per-microbatch 2048 \
        --old-logprobs engine --lr 4e-5 --num-steps 20 --eval-interval 20 --eval-prompts 48 \
        --eval-samples 2 --eval-temperature 1
"""

import random
import re

PEOPLE = "Ann Tom Mia Ben Zoe Sam Eva Max Lea Jon Ida Leo Amy Kim Pat Roy".split()
SHOWN = [
    {"role": "system", "content": "Find the code. Answer with: ask NAME, or with the code."},
    {"role": "user", "content": "What is the code? Bob may know."},
    {"role": "assistant", "content": "ask Bob"},
    {"role": "user", "content": "Bob says: the code is 273."},
    {"role": "assistant", "content": "273"},
]


def run(task: dict, client) -> dict:
    """Play one episode: a chain of one to four people, one of whom is named beside somebody who
    does not know. New knowledge pays 0.3, the code 1.
    """
    draw = random.Random(task["seed"])
    code, (stranger, *chain) = str(draw.randint(100, 999)), draw.sample(PEOPLE, draw.randint(2, 5))
    fork = draw.randrange(len(chain))

    def hint(place: int) -> str:
        named = [chain[place], *([stranger] if place == fork else [])]
        return " or ".join(draw.sample(named, len(named)))

    says = [f"{hint(place)} may know." for place in range(len(chain))] + [f"the code is {code}."]
    calls, known = {}, 0
    messages = [*SHOWN, {"role": "user", "content": f"What is the code? {says[0]}"}]
    for _ in range(len(chain) + 3):
        reply = client.chat.completions.create(model="finder", messages=messages)
        answer = (reply.choices[0].message.content or "").strip()
        if known == len(chain) and answer == code:
            return {"reward": 1.0, "success": True, "calls": calls}
        name, result = answer.removeprefix("ask "), "Nobody of this name is here."
        if answer.startswith("ask ") and name in chain[: known + 1]:
            place = chain.index(name)
            if place == known:
                calls[reply.id], known = 0.3, known + 1
            result = f"{name} says: {says[place + 1]}"
        elif answer == f"ask {stranger}":
            result = f"{name} says: I do not know."
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": result},
        ]
    return {"reward": 0.0, "success": False, "calls": calls}


def ideal(messages: list[dict], tools: list[dict]) -> str:
    """Return the answer of a model that asks whoever was named last and was not asked yet."""
    heard = [message["content"] for message in messages[len(SHOWN) :]]
    if code := re.search(r"the code is (\d+)", heard[-1]):
        return code[1]
    hints = [text for text in heard if text.endswith("may know.")]
    named = re.findall(r"(\w+) (?:or|may)", hints[-1])
    return "ask " + next(name for name in named if f"ask {name}" not in heard)
