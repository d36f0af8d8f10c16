"""A process that holds a part of a model and follows rank 0 (`--tp-size`). Its parent is rank 0, or
on another node the process that follows node 0 (`node.py`). The parent writes one line of JSON to
standard input and keeps it open: end of file means that the parent is gone, and this process ends
immediately.

It takes no requests, has no scheduler, and opens no port except those of gloo.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec
import zmq

from weft.config.engine_args import FollowerArgs
from weft.config.process import LAST_WORDS_BYTES
from weft.launch.start_worker import die_with_parent
from weft.ops import meta_kernels
from weft.weights.known import MINILM, SMOLLM2

if TYPE_CHECKING:
    from weft.parallel.links import Link


def main() -> None:
    lines: SimpleQueue[bytes] = SimpleQueue()
    die_with_parent(lines)
    # The launcher handles Ctrl-C and stops all processes in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    meta_kernels.defer(SMOLLM2.module, MINILM.module)
    args = FollowerArgs.from_json(lines.get())
    # End immediately: no thread of the device may delay it.
    os._exit(run(args))


def run(args: FollowerArgs) -> int:
    """Follow until rank 0 is gone. Returns the exit status."""
    from weft.assemble.draft_runner import head_spec
    from weft.assemble.model_config import choose_model
    from weft.assemble.ranks import FailedRank, joined_as
    from weft.config.model import ModelError
    from weft.config.options import SettingsError
    from weft.config.resolve import kept_as
    from weft.config.sizing import window_tokens
    from weft.executor.build import load_runner
    from weft.executor.ranks.follower import follow
    from weft.executor.wire.followers import FAILED, READY
    from weft.observe import garbage, log
    from weft.ops.sharding import RankLost

    log.setup(args.log_level, format=args.log_format)
    config = args.config
    link = link_of(args)
    try:
        link.send(READY)
        ranks = joined_as(args)
        folder = Path(args.folder)
        model = kept_as(config, choose_model(config, folder, here=True))
        runner = load_runner(
            replace(config, overlap=False),
            model,
            folder=folder,
            kv_tokens=config.kv_tokens,
            window_tokens=window_tokens(config),
            num_state_slots=config.max_mamba_cache_size,
            page_size=config.page_size,
            max_rows=config.max_running_requests,
            context_length=config.context_length,
            draft=head_spec(config, model),
            ranks=ranks,
        )
        garbage.freeze()
        gc.enable()
        link.send(READY)
    except RankLost:
        return 1
    except Exception as exc:
        is_users = isinstance(exc, ModelError | SettingsError | MemoryError)
        if not is_users:
            log.EventLog("engine").exception("rank_failed", rank=args.rank)
        message = str(exc) if is_users else f"{type(exc).__name__}: {exc}"
        _say_last(args, message or "out of memory")
        link.send(FAILED, msgspec.json.encode(FailedRank(message or "out of memory", is_users)))
        link.close()
        return 2 if is_users else 1
    try:
        follow(runner, link, args.rank)
    except Exception as exc:
        log.EventLog("engine").exception("rank_failed", rank=args.rank)
        _say_last(args, f"{type(exc).__name__}: {exc}")
        link.close()
        return 1
    return 0


def _say_last(args: FollowerArgs, reason: str) -> None:
    """Write the reason to the pipe of the parent, which may notice the end of this process before
    rank 0 reads the failure from the link."""
    if args.last_words >= 0:
        os.write(args.last_words, reason.encode(errors="replace")[:LAST_WORDS_BYTES])


def link_of(args: FollowerArgs) -> Link:
    """This rank's end of the link to rank 0."""
    from weft.parallel.door import address, calling, keys_of
    from weft.parallel.links import Loss, NodeLink, SocketLink

    if args.link >= 0:
        return SocketLink(socket.socket(fileno=args.link))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    end = calling(context, keys_of(args.config.dist_secret))
    end.connect(address(args.host, args.plans))
    return NodeLink(end, Loss(), context)


if __name__ == "__main__":
    main()
