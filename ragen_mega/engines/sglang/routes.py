"""The experts that tokens went through in an SGLang server, in an answer of `/generate`.

SGLang returns the experts of all tokens but the last, from a position on that the request names,
for tokens found in its cache too: the text of 4-byte integers [tokens, layers, k] in base64
(`sglang/srt/state_capturer/routed_experts.py`).
"""

import base64
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragen_mega.data.fields import routes_of_completion
from ragen_mega.data.types import Completion
from ragen_mega.models.shape import ModelShape


def with_routes(
    completion: Completion, about: dict[str, Any], shape: ModelShape, *, num_unknown: int
) -> Completion:
    """Return the completion with the routes of its tokens, and of the last `num_unknown` of its
    prompt. Raises RuntimeError, in one line, if `meta_info` does not have them.
    """
    num_sampled = len(completion.tokens)
    routes = _read(about.get("routed_experts"), shape, num_unknown + num_sampled - 1)
    further, of_prompt = routes_of_completion(routes, num_sampled)
    return replace(completion, further_fields=further, prompt_fields=of_prompt)


def _read(text: str | None, shape: ModelShape, num_tokens: int) -> NDArray[np.uint8]:
    """Return the routes [tokens, layers, k]."""
    size = (num_tokens, shape.num_layers, shape.experts_per_token)
    values = np.frombuffer(base64.b64decode(text or ""), np.int32)
    if values.size != np.prod(size):
        raise RuntimeError(
            f"the SGLang server returned {values.size} experts for {size[0]} tokens of {size[1]}"
            f" layers with {size[2]} experts each; it must run SGLang 0.5.17 or a later version,"
            " with --enable-return-routed-experts"
        )
    values = values.reshape(size)
    wrong = (values < 0) | (values >= shape.num_experts)
    ordered = np.sort(values, axis=-1)
    wrong[..., 1:] |= ordered[..., 1:] == ordered[..., :-1]
    if wrong.any():
        token, layer, _ = np.argwhere(wrong)[0]
        raise RuntimeError(
            f"the SGLang server returned the experts {values[token, layer].tolist()} for a token in"
            f" layer {layer}, not {size[2]} distinct ones of {shape.num_experts}; drop pipeline"
            " parallelism and speculative decoding, which lose some, from --sglang-arguments"
        )
    return values.astype(np.uint8)
