"""WebShop trains, evaluates on goals that it does not train on, and names what it says."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.support.training import launch, read_metrics

FLAGS = (
    *("--environments", "webshop", "--max-context-length", "1792", "--max-response-length", "96"),
    *("--environment-options", json.dumps({"webshop": {"num_products": 300, "departments": 1}})),
    *("--warm-start-first-turns", "3", "--warm-start-first-turn-steps", "20"),
    *("--warm-start-steps", "5", "--warm-start-trajectories", "20", "--num-steps", "2"),
)


@pytest.mark.slow
def test_a_small_model_trains_on_a_generated_catalogue(tmp_path: Path) -> None:
    run = launch(tmp_path, 1, *FLAGS)
    assert len(read_metrics(run)) == 2
    summary = json.loads((run / "summary.json").read_text())
    result = summary["sets"]["webshop"]
    assert result["num_prompts"] == 16 and result["optimum"] == 1.0
    tokenizer = AutoTokenizer.from_pretrained(run / "base")
    assert len(tokenizer.encode(" [SEP] B7KVUT98FN")) > 3  # is in no catalogue of this size
    assert len(tokenizer) > 256 + 300  # identifiers
