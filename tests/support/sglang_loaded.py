"""python sglang_loaded.py RANK FILE ARGUMENT...: load a model by SGLang's own loader, as a rank of
a server with these arguments does, and save its parameters. Runs in SGLang's environment.
"""

import argparse
import sys

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state_wrapper import ParallelState
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import PortArgs, ServerArgs


def main(rank: int, file: str, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    server = ServerArgs.from_cli_args(parser.parse_args(arguments))
    initialize_moe_config(server)
    size, ep = server.tp_size, server.ep_size
    place = ParallelState(
        tp_rank=rank, tp_size=size, attn_tp_rank=rank, attn_tp_size=size, attn_cp_rank=0,
        attn_cp_size=1, attn_dp_rank=0, attn_dp_size=1, pp_rank=0, pp_size=1, dp_rank=None,
        dp_size=1, moe_ep_rank=rank * ep // size, moe_ep_size=ep, moe_dp_rank=None, moe_dp_size=1,
        dcp_size=1, gpu_id=rank,
    )  # fmt: skip
    runner = ModelRunner(
        model_config=ModelConfig.from_server_args(server),
        mem_fraction_static=server.mem_fraction_static,
        gpu_id=rank,
        ps=place,
        nccl_port=PortArgs.init_new(server).nccl_port,
        server_args=server,
    )
    torch.save({name: tensor.detach() for name, tensor in runner.model.named_parameters()}, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
