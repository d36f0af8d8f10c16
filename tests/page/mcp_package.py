"""A server of the Model Context Protocol by the Python package `mcp`, for tests of the live page.

    python mcp_package.py PORT [ORIGIN ...]

Pages of these origins may reach it. It imports nothing else, so any Python that has the package can
run it. The tool `wait` waits for 30 s.
"""

from __future__ import annotations

import sys
from typing import Any

import anyio
import uvicorn
from mcp.server.mcpserver import MCPServer  # type: ignore[import-not-found]
from mcp.server.mcpserver.exceptions import ToolError  # type: ignore[import-not-found]
from starlette.middleware.cors import CORSMiddleware

WAIT_S = 30.0


def made() -> MCPServer:
    server = MCPServer("tools")

    @server.tool()
    def add(a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b

    @server.tool()
    def fail(words: str) -> str:
        """Fails."""
        raise ToolError(words)

    @server.tool()
    async def wait() -> str:
        """Waits."""
        await anyio.sleep(WAIT_S)
        return "waited"

    return server


def main() -> None:
    port = int(sys.argv[1])
    origins = sys.argv[2:]
    app: Any = made().streamable_http_app()
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["mcp-session-id"],
        )
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
