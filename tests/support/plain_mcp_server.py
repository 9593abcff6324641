"""A server of tools without the SDK, of an older protocol, that starts at once: `python
plain_mcp_server.py [FAULT]`. It counts the calls of its session.
"""

import json
import os
import signal
import sys
import time

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = {
    "name": "add",
    "inputSchema": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}},
}
TOOLS = {
    "no tools": [],
    "no list": 7,
    "reads": [ADD | {"annotations": {"readOnlyHint": True}}],
    "reads and writes": [
        ADD | {"annotations": {"readOnlyHint": True}},
        ADD | {"name": "write", "annotations": {"readOnlyHint": False}},
    ],
    "no schema": [
        {"name": "add", "inputSchema": {"type": "object", "properties": {"a": {"type": "whole"}}}}
    ],
}
STUBBORN = "stubborn"
"""Fault of a server that does not end with its input, nor by SIGTERM."""


def answer(method: str, params: dict, num_calls: int) -> dict:
    if method == "initialize":
        about = {"name": "plain", "version": "1"}
        version = params["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": TOOLS.get(FAULT, [ADD])}
    if FAULT == "dies":
        sys.exit("out of paper")
    if FAULT == "hangs":
        time.sleep(600)
    if FAULT == "nonsense":
        return {"content": "4"}
    text = str(sum(params["arguments"].values()))
    return {"content": [{"type": "text", "text": f"{text} in call {num_calls}"}]}


def serve() -> None:
    if FAULT == "no start":
        sys.exit("no licence")
    if FAULT == "no answer":
        time.sleep(600)
    if FAULT == STUBBORN:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open("pids", "a") as file:
            print(os.getpid(), file=file)
    num_calls = 0
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        reply: dict = {"error": {"code": -32601, "message": "no such method"}}
        if asked["method"] in ("initialize", "tools/list", "tools/call"):
            num_calls += asked["method"] == "tools/call"
            reply = {"result": answer(asked["method"], asked.get("params", {}), num_calls)}
        if FAULT.startswith("refuses") and asked["method"] == "tools/call":
            code = int(FAULT.partition(" ")[2] or -32602)
            reply = {"error": {"code": code, "message": "no such arguments"}}
        if FAULT == "notifies" and asked["method"] == "tools/call":
            news = {"level": "info", "data": f"call {num_calls}"}
            note = {"method": "notifications/message", "params": news}
            print(json.dumps({"jsonrpc": "2.0", **note}), flush=True)
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **reply}), flush=True)
    if FAULT == STUBBORN:
        time.sleep(600)


if __name__ == "__main__":
    serve()
