"""WebShop trains, evaluates on goals that it does not train on, and names what it says."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ragen_mega.environments.worlds.webshop.world import WebShop
from tests.support.training import launch, read_metrics

FLAGS = (
    *("--environments", "webshop", "--max-context-length", "1024", "--max-response-length", "32"),
    *("--environment-options", json.dumps({"webshop": {"num_products": 300, "departments": 1}})),
    *("--warm-start-first-turns", "3", "--warm-start-first-turn-steps", "20"),
    *("--warm-start-steps", "5", "--warm-start-trajectories", "20", "--num-steps", "2"),
)


@pytest.mark.slow
@pytest.mark.forks
def test_a_small_model_trains_on_a_generated_catalogue(tmp_path: Path) -> None:
    run = launch(tmp_path, 1, *FLAGS)
    assert len(read_metrics(run)) == 2
    summary = json.loads((run / "summary.json").read_text())
    result = summary["sets"]["webshop"]
    assert result["num_prompts"] == 16 and result["optimum"] == 1.0
    tokenizer = AutoTokenizer.from_pretrained(run / "base")
    shop = WebShop(num_products=2000, departments=1).shop  # not the one that it was trained on
    assert all(len(tokenizer.encode(asin)) == 2 for asin in shop.products)
