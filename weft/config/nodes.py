"""Several machines that hold one model (`--nnodes`): the ranks of each, and the settings that must
be equal on all."""

from __future__ import annotations

from weft.config.engine import EngineConfig
from weft.config.handoff import is_loopback
from weft.config.options import SettingsError

# Settings that change the weights or their parts: node 0 decides them, and a different value on
# another node is an error.
SAME = (
    *("nnodes", "tp_size", "dist_backend", "load_format", "dtype", "quantize", "kv_dtype"),
    "quantize_encoder",
    *("kernels", "model_impl", "language_model_only", "task", "seed"),
)
UNSAID = (0, "", "auto")


def check_nodes(config: EngineConfig) -> None:
    """Raise SettingsError if the settings of nodes contradict each other."""
    if config.nnodes == 1:
        if config.node_rank:
            raise SettingsError(
                f"--node-rank is {config.node_rank}, but there is only one node (--nnodes)"
            )
        return
    if config.node_rank >= config.nnodes:
        raise SettingsError(
            f"--node-rank is {config.node_rank}; with --nnodes {config.nnodes} it is "
            f"0 to {config.nnodes - 1}"
        )
    if config.tp_size % config.nnodes:
        raise SettingsError(
            f"--nnodes is {config.nnodes}, which does not divide --tp-size ({config.tp_size}): "
            "each node must have the same number of ranks"
        )
    host, _ = address_of(config)
    if not config.dist_secret and not is_loopback(host):
        raise SettingsError(
            f"--dist-init-addr is {config.dist_init_addr}, which others can reach: give all "
            "nodes the same --dist-secret (better: WEFT_DIST_SECRET)"
        )


def address_of(config: EngineConfig) -> tuple[str, int]:
    """Host and port at which node 0 waits for the other nodes. Raises SettingsError."""
    address = config.dist_init_addr
    if not address:
        raise SettingsError(
            f"--nnodes is {config.nnodes}, which needs --dist-init-addr: HOST:PORT of node 0"
        )
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(f"--dist-init-addr is {address[:200]!r}; it is HOST:PORT")
    return host, int(port)


def ranks_of(config: EngineConfig, node: int) -> range:
    """The ranks of a node."""
    num_ranks = config.tp_size // config.nnodes
    return range(node * num_ranks, (node + 1) * num_ranks)


def said_otherwise(config: EngineConfig, node_0: EngineConfig) -> str:
    """The first setting that was given to this node and differs on node 0, as a text; "" if there
    is none."""
    for name in SAME:
        here = getattr(config, name)
        there = getattr(node_0, name)
        if here not in UNSAID and here != there:
            return f"--{name.replace('_', '-')} is {here} here, and {there or 'not set'} on node 0"
    return ""
