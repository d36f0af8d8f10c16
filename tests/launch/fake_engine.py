"""An engine process without a model: it speaks the channel, and every request gets the token "a"
now and then.

FAKE_ENGINE says how it behaves: a list of words with values, "loading token_s=0.01 refuse crash
stubborn stuck gated". One that is stuck stands still in the first step. Before there is the file
FAKE_GATE, one that is loading does not become ready, and one that is gated gives a request no token
but the first.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import zmq

from weft.config.engine_args import EngineArgs
from weft.launch.heartbeat import HeartbeatSender
from weft.messages.channel import Receiver, Sender
from weft.messages.codec import decode_to_engine
from weft.messages.replies import Finish, StepOutput
from weft.messages.requests import Abort, BatchGenerate, GenerateRequest
from weft.messages.status import EngineFailed, EngineReady

TOKEN = 64  # "a" in the tiny model's tokenizer


def main() -> None:
    args = EngineArgs.from_json(sys.stdin.buffer.readline())
    behaviour = dict(word.partition("=")[::2] for word in os.environ.get("FAKE_ENGINE", "").split())
    if "FAKE_PID_FILE" in os.environ:
        mark = args.rpc.rpartition("rpc")[2]  # ".dp1" of an engine beside others
        Path(os.environ["FAKE_PID_FILE"] + mark).write_text(str(os.getpid()))
    if "stubborn" not in behaviour:
        threading.Thread(target=end_with_parent, daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = Sender(context, args.from_engine)
    receiver = Receiver(context, args.to_engine, decode_to_engine)
    gate = Path(os.environ.get("FAKE_GATE", ""))
    while "loading" in behaviour and not gate.exists():
        time.sleep(0.01)
    if "crash" in behaviour:
        sys.exit(7)
    if "refuse" in behaviour or "fail" in behaviour:
        sender.send(
            EngineFailed(message="the weights are made of wool", user_error="refuse" in behaviour)
        )
        sender.close(linger_s=60.0)
        context.term()
        os._exit(1)
    sender.send(
        EngineReady(
            model_summary="fake",
            vocab_size=258,
            context_length=args.config.context_length,
            max_prompt_tokens=args.config.context_length - 1,
            kv_tokens=args.config.kv_tokens,
            page_size=args.config.page_size,
            startup=[("weights", "1 byte loaded", 0.01)],
        )
    )
    heartbeat = HeartbeatSender(context, args.from_engine)
    heartbeat.start()
    if "stuck" in behaviour:
        receiver.wait(3600)
        with heartbeat:
            time.sleep(3600)
    serve(
        sender,
        receiver,
        heartbeat,
        float(behaviour.get("token_s", 0.001)),
        gate if "gated" in behaviour else None,
    )


def serve(
    sender: Sender,
    receiver: Receiver,
    heartbeat: HeartbeatSender,
    token_s: float,
    gate: Path | None,
) -> None:
    left: dict[int, int] = {}  # tokens that each request is still to get
    begun: set[int] = set()  # those that have got one
    while True:
        if not left:
            receiver.wait(3600)
        for message in receiver.drain():
            if isinstance(message, GenerateRequest | BatchGenerate):
                work = [message] if isinstance(message, GenerateRequest) else message.members()
                left |= {one.id: one.sampling.max_new_tokens or 1 for one in work}
            elif isinstance(message, Abort):
                for number in left if message.all else set(message.ids) & set(left):
                    sender.send(
                        StepOutput(
                            finished=[Finish(id=number, reason="abort", message=message.message)]
                        )
                    )
                left = (
                    {}
                    if message.all
                    else {number: n for number, n in left.items() if number not in message.ids}
                )
        if left:
            with heartbeat:
                time.sleep(token_s)
            if gate is not None and not gate.exists() and begun >= left.keys():
                continue
            ids = np.array(list(left), dtype=np.int64)
            begun |= left.keys()
            left = {number: n - 1 for number, n in left.items()}
            finished = [Finish(id=number, reason="length") for number, n in left.items() if n == 0]
            sender.send(
                StepOutput(
                    ids=ids.tobytes(),
                    tokens=np.full(len(ids), TOKEN, np.int32).tobytes(),
                    finished=finished,
                )
            )
            left = {number: n for number, n in left.items() if n > 0}


def end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
