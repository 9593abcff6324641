"""A server of tools, by the official SDK: `python mcp_server.py`, or with a port as argument over
HTTP.
"""

import os
import sys
import time
from typing import Annotated, Literal

from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image
from pydantic import BaseModel, Field

server = MCPServer("tools of the tests", log_level="ERROR")
notes: dict[str | None, list[str]] = {}
"""Notes of each session: over HTTP a header names it, a program has one."""


class Town(BaseModel):
    name: str
    people: int


@server.tool()
def add(a: Annotated[int, Field(ge=0, le=99)], b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str, context: Context) -> str:
    """Keep a note, and list all that are kept."""
    session = (context.headers or {}).get("mcp-session-id")
    notes.setdefault(session, []).append(text)
    return ", ".join(notes[session])


@server.tool()
def town(name: Literal["Bern", "Graz"]) -> Town:
    """Say how many people live in a town."""
    return Town(name=name, people={"Bern": 137_000, "Graz": 306_000}[name])


@server.tool()
def draw() -> list:
    """Draw a picture."""
    return ["a dot", Image(data=b"\x89PNG", format="png")]


@server.tool()
def fault(kind: Literal["raise", "hang", "die", "print", "huge"]) -> str:
    """Do not answer as a tool should."""
    match kind:
        case "raise":
            raise RuntimeError("the shelf is empty")
        case "hang":
            time.sleep(600)
        case "die":
            print("out of paper", file=sys.stderr, flush=True)
            os._exit(3)
        case "print":
            print("a line that is no message", flush=True)
    return "x" * 10_000_000


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    server.run()
