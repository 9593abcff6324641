"""Prints how many times each kernel would be compiled for sm_90 over batches of many lengths, as a
JSON object.

Every operation is called on CPU tensors; where a launch would compile and start a kernel, Triton's
own cache key is noted.
"""

import json
from collections import defaultdict

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
LENGTHS = (1, 2, 3, 4, 7, 16, 33, 128, 1000)
VOCAB = 64
variants: dict[str, set[str]] = defaultdict(set)


def note_launch(self, *args, grid, warmup, **kwargs):
    bind = create_function_from_signature(self.signature, self.params, BACKEND)
    _, specialization, options = bind(*args, **kwargs)
    variants[self.fn.__name__].add(str((specialization, options)))


def launch_all(num_tokens: int, start: int) -> None:
    """All operations on the tokens from `start` of a longer batch."""
    from ragen_kernels import triton_policy, triton_returns, triton_rows, triton_token
    from ragen_kernels.objective import PolicyObjective, TokenTerms
    from ragen_kernels.vocab import vocab_shard

    def numbers(count: int) -> torch.Tensor:
        return torch.rand(count, start + num_tokens)[:, start:]

    objective = PolicyObjective(0.1, 0.3, 1.5, "k3", 0.2, 0.03, 1.05)
    labels = torch.randint(0, VOCAB, (start + num_tokens,))[start:]
    terms, shard = TokenTerms(*numbers(5)), vocab_shard(VOCAB, 0, None, None)
    logits = torch.randn(num_tokens, VOCAB)
    rows = triton_rows.row_statistics(logits, labels, shard, 1.0)
    triton_rows.logits_gradient(logits, logits, labels, rows, *numbers(2), shard, 1.0)
    triton_token.token_losses(*numbers(2), terms, objective)
    triton_policy.policy_rows_(logits, labels, terms, objective, shard, 1.0)
    offsets, mask = torch.tensor([0, num_tokens], dtype=torch.int32), terms[0] > 0.5
    triton_returns.gae(*numbers(2), mask, offsets, gamma=1.0, lam=0.9, turn_ends=mask)


if __name__ == "__main__":
    JITFunction.run = note_launch
    for offset, length in enumerate(LENGTHS):
        launch_all(length, 0)
        launch_all(length, offset % 4)
    print(json.dumps({name: len(keys) for name, keys in variants.items()}))
