"""Control requests about adapters (LoRA), and their reply.

An adapter is known by its content: `uid` is the beginning of a SHA-256, 32 hexadecimal digits, over
the bytes of adapter_config.json and of adapter_model.safetensors. Names are the front's.
"""

from __future__ import annotations

from weft.messages.calls import ControlRequest, SuccessReply


class AdapterReply(SuccessReply):
    status: int = 200  # as an HTTP status
    evicted: list[str] = []  # uids of adapters that had to go to make room
    num_requests: int = 0  # that an adapter was unloaded behind


class LoadLoraAdapter(ControlRequest[AdapterReply]):
    """Load an adapter. Answered when requests may name it; one that is loaded already stays."""

    lora_path: str  # its folder, below --weights-root or as --lora-paths names it
    uid: str
    lora_name: str = ""  # for people
    pinned: bool = False  # it keeps a slot while it is loaded, and is never evicted


class UnloadLoraAdapter(ControlRequest[AdapterReply]):
    """Unload an adapter. New requests are refused at once, answered when its open ones have
    ended."""

    uid: str
