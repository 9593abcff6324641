"""Task files for a small model, in the folder task_files: python examples/task_files.py.

Six tasks in which a written thought could help, for the study thought_tasks: each has a file of
2,000 questions and two files of two worked examples, with and without the steps of the solution as
the thought. With the package vaderSentiment there is also the file sentiment.jsonl, for the study
task_files: words of its lexicon (Hutto and Gilbert, ICWSM 2014) that people find good or bad.
"""

import importlib.util
import json
import random
from pathlib import Path

FOLDER = Path("task_files")
SUM = "State the final answer to the following arithmetic problem: {} ="
"""As reasoning_gym:chain_sum asks."""
SENTIMENT = "Is this word good or bad: {}"
WORDS = (
    "cat dog sun map tree fish ball milk bird star moon rain snow wind fire leaf rock sand gold"
    " ship boat road door desk lamp book cup fork rice corn bean meat soup cake salt ring"
).split()


def arrows(draw: random.Random) -> tuple[str, str, str]:
    """Return (question, thought, answer): the end of three arrows among nine."""
    words = draw.sample(WORDS, 10)
    path, rest = words[:4], words[4:]
    pairs = list(zip(path, path[1:])) + list(zip(rest, rest[1:] + rest[:1]))
    draw.shuffle(pairs)
    drawn = ", ".join(f"{start} > {end}" for start, end in pairs)
    return f"{drawn}. Follow three arrows from {path[0]}", " > ".join(path), path[-1]


def largest(draw: random.Random) -> tuple[str, str, str]:
    """Return (question, thought, answer): the largest of five numbers."""
    numbers = draw.sample(range(10, 100), 5)
    maxima = [max(numbers[: count + 1]) for count in range(5)]
    question = f"Which number is the largest: {', '.join(map(str, numbers))}"
    return question, " ".join(map(str, maxima)), str(max(numbers))


def second_smallest(draw: random.Random) -> tuple[str, str, str]:
    """Return (question, thought, answer): the second smallest of four numbers."""
    numbers = draw.sample(range(10, 100), 4)
    in_order = sorted(numbers)
    question = f"Which number is the second smallest: {', '.join(map(str, numbers))}"
    return question, " ".join(map(str, in_order)), str(in_order[1])


def third_from_end(draw: random.Random) -> tuple[str, str, str]:
    """Return (question, thought, answer): the third word from the end of six to nine."""
    words = draw.sample(WORDS, draw.randint(6, 9))
    question = f"Which word is the third from the end: {' '.join(words)}"
    return question, " ".join(words[-3:]), words[-3]


def occurrences(draw: random.Random) -> tuple[str, str, str]:
    """Return (question, thought, answer): how often a word stands among eight."""
    word, *others = draw.sample(WORDS, 4)
    count = draw.randint(1, 5)
    words = [word] * count + [draw.choice(others) for _ in range(8 - count)]
    draw.shuffle(words)
    counted = " ".join(f"{word} {number + 1}" for number in range(count))
    return f"How often does {word} stand here: {' '.join(words)}", counted, str(count)


def digits(draw: random.Random) -> tuple[str, str, str]:
    """Return (question, thought, answer): the sum of four digits."""
    numbers = [draw.randint(1, 9) for _ in range(4)]
    sums = [sum(numbers[: count + 1]) for count in range(4)]
    steps = [f"{sums[i]} + {numbers[i + 1]} = {sums[i + 1]}" for i in range(3)]
    return f"What is {' + '.join(map(str, numbers))}", ", ".join(steps), str(sums[-1])


def write(name: str, rows: list[dict]) -> None:
    """Write JSON lines into a file of the folder."""
    (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def sentiment() -> list[dict]:
    """Return a row for each word of the lexicon whose mean rating is at least 1.5 from neutral."""
    spec = importlib.util.find_spec("vaderSentiment")
    if spec is None or spec.origin is None:
        return []
    rows = []
    for line in (Path(spec.origin).parent / "vader_lexicon.txt").read_text().splitlines():
        word, rating, *_ = line.split("\t")
        if word.isalpha() and abs(float(rating)) >= 1.5:
            answer = "good" if float(rating) > 0 else "bad"
            rows.append({"question": SENTIMENT.format(word), "answer": answer})
    return rows


def conversation(question: str, reply: str) -> dict:
    """Return a worked example."""
    turns = (("user", question), ("assistant", reply))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def main() -> None:
    """Write the files of all tasks; the same at every call."""
    FOLDER.mkdir(exist_ok=True)
    for task in (arrows, largest, second_smallest, third_from_end, occurrences, digits):
        name, draw = task.__name__, random.Random(1)
        solved: dict[str, tuple[str, str]] = {}  # a question stands once
        while len(solved) < 2002:
            question, thought, answer = task(draw)
            solved[question] = (thought, answer)
        examples, tasks = list(solved.items())[:2], list(solved.items())[2:]
        write(f"{name}.jsonl", [{"question": q, "answer": a} for q, (_, a) in tasks])
        for kind in ("thought", "plain"):
            rows = []
            for question, (thought, answer) in examples:
                before = f"<think>{thought}</think>" if kind == "thought" else ""
                rows.append(conversation(question, f"{before}<answer>{answer}</answer>"))
            write(f"{name}_{kind}.jsonl", rows)
    if rows := sentiment():
        write("sentiment.jsonl", rows)
    for name, question, shown in (
        ("sentiment", SENTIMENT, {"sunny": "good", "broken": "bad"}),
        ("sums", SUM, {"2 + 5": "7", "9 - 4": "5"}),
    ):
        rows = [conversation(question.format(a), f"<answer>{b}</answer>") for a, b in shown.items()]
        write(f"{name}_plain.jsonl", rows)


if __name__ == "__main__":
    main()
