"""Settings of the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.options import option


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    host: str = option("127.0.0.1", "address to listen on", group="server", everyday=True)
    port: int = option(30000, "port to listen on; 0 takes a free one", group="server", everyday=True, low=0, high=65535)
    served_model_name: str = option("", "name in the API; the model's own if not given", group="server", everyday=True)
    api_key: str = option("", "key that every request must carry (better: WEFT_API_KEY)", group="server", everyday=True)
    admin_api_key: str = option(
        "", "key of the administration routes; without it they answer on loopback only", group="server"
    )
    cors_origins: str = option(
        "", "origins allowed by CORS, separated by commas", group="server", elsewhere=("allowed_origins",)
    )
    max_body_mb: float = option(16.0, "largest request body", group="server", low=0.001, high=1024.0)
    drain_s: float = option(
        10.0, "time that open requests get when the server is stopped", group="server", low=0.0, high=3600.0
    )
    chat_template: str = option("", "file with a Jinja chat template, instead of the model's", group="server")
    log_level: str = option(
        "info",
        "what is logged",
        group="server",
        everyday=True,
        choices=("debug", "info", "warning", "error"),
        elsewhere=("uvicorn_log_level",),
    )
    log_requests: bool = option(
        False, "one log line per finished request", group="server", everyday=True, elsewhere=("enable_log_requests",)
    )
