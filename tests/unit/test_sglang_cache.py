"""A server that found less memory than it was asked to fill says so."""

import sys
import warnings
from pathlib import Path

import pytest

from ragen_mega.engines.sglang.engine import check_cache
from ragen_mega.engines.sglang.server import ServerSettings
from ragen_mega.rollout.engine import EngineError


def test_a_small_cache_is_no_secret(tmp_path: Path) -> None:
    settings = ServerSettings(
        Path(sys.executable),
        tmp_path,
        max_context=400,
        max_running_requests=16,
        kv_cache_tokens=8192,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_cache(8192, settings)
    with pytest.warns(
        UserWarning,
        match="5000 tokens .* 8192; lower --kv-cache",
    ):
        check_cache(5000, settings)
    with pytest.raises(EngineError, match="399 tokens .* up to 400"):
        check_cache(399, settings)
