"""What does a server's prefix cache hold? A router follows it by KV events, and asks for what it has missed.

The server: weft serve --kv-events-config '{"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557",
"bind": true, "replay_endpoint": "tcp://127.0.0.1:5558"}'
"""

import os

import msgspec
import zmq

EVENTS = os.environ.get("WEFT_KV_EVENTS", "tcp://127.0.0.1:5557")
REPLAY = os.environ.get("WEFT_KV_REPLAY", "tcp://127.0.0.1:5558")
PATIENCE_MS = 10_000


class CacheFollower:
    """Knows the blocks of one engine: by their hash the block before, and the tokens."""

    def __init__(self, events: str, replay: str, topic: str = "") -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.last = -1  # number of the last batch that was followed
        self._heard = -1  # of the last one that came without being asked for
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._sub.connect(events)
        self._replay = replay
        self.catch_up(0)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def follow(self, timeout_ms: int) -> bool:
        """Wait for a batch. Returns whether one came."""
        if not self._sub.poll(timeout_ms):
            return False
        _, number, payload = self._sub.recv_multipart()
        self._take(int.from_bytes(number, "big"), payload)
        return True

    def catch_up(self, first: int | None = None) -> None:
        """Ask for all from a number on; without one, for what has not been followed yet."""
        if first is None:
            first = self.last + 1
        # No REQ socket, which would take one answer for each question; a new one, as what may
        # still come behind an earlier question is for nobody.
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._replay)
            socket.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                if not socket.poll(PATIENCE_MS):
                    raise TimeoutError(f"{self._replay} does not answer")
                _, number, payload = socket.recv_multipart()
                if not payload:
                    return
                self._apply(payload)
                self.last = int.from_bytes(number, "big")

    def _take(self, number: int, payload: bytes) -> None:
        if number <= self._heard:
            self.catch_up(0)  # another engine, whose clock is behind
        elif number == self.last + 1:
            self._apply(payload)
            self.last = number
        elif number > self.last:
            self.catch_up()  # some were missed
        self._heard = number

    def _apply(self, payload: bytes) -> None:
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    self.blocks.pop(name, None)
            else:
                self._store(event)

    def _store(self, event: dict[str, object]) -> None:
        size = event["block_size"]
        tokens = event["token_ids"]
        before = event["parent_block_hash"]
        for index, name in enumerate(event["block_hashes"]):
            part = tokens[index * size : (index + 1) * size]
            self.blocks[name] = (before, tuple(part))
            before = name


def main() -> None:
    follower = CacheFollower(EVENTS, REPLAY)
    num_tokens = sum(len(tokens) for _, tokens in follower.blocks.values())
    print(f"{len(follower.blocks)} blocks with {num_tokens} tokens are cached")
    follower.close()


if __name__ == "__main__":
    main()
