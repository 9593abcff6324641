"""Serve an environment to OpenEnv clients, one for each WebSocket session.

    ragen-mega serve-environment --environment sokoban --port 8000

Clients connect to ws://127.0.0.1:PORT (this trainer: --environments openenv:ws://127.0.0.1:PORT).
Whoever reaches the port can play; it is open to this machine alone unless --host says otherwise.
"""

import argparse
import logging

from ragen_mega.commands.command_line import command, flag
from ragen_mega.config.sections.environment import json_object, with_directory
from ragen_mega.environments.adapters.packages import required
from ragen_mega.ranks.launcher import open_many_files

FLAGS = (
    flag("--environment", "name or import path", required=True),
    flag("--environment-options", "JSON object of its options", "{}"),
    flag("--port", "where to listen; 0: any free one", 8000),
    flag("--host", "address to listen on", "127.0.0.1"),
    flag("--max-sessions", "clients at a time", 1024),
    flag("--idle-timeout", "seconds of silence after which a client's session is closed", 600.0),
)


@command(__doc__, *FLAGS)
def main(arguments: argparse.Namespace) -> None:
    required("openenv.core:GenericEnvClient", "openenv")
    import uvicorn
    from fastapi import WebSocketDisconnect

    from ragen_mega.environments.adapters.openenv_server import application
    from ragen_mega.environments.adapters.web_guard import MOST_BYTES, ImpatientProtocol, guard

    options = json_object("--environment-options", arguments.environment_options)
    options = with_directory(arguments.environment, options)
    open_many_files()  # every session is one
    app = application(arguments.environment, options, arguments.max_sessions)
    app = guard(app, arguments.idle_timeout)
    # openenv-core closes a session that its client has closed already, which uvicorn would trace.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], WebSocketDisconnect))
    )
    uvicorn.run(
        app,
        host=arguments.host,
        port=arguments.port,
        log_level="info",
        access_log=False,
        http=ImpatientProtocol,
        ws_max_size=MOST_BYTES,
    )
