"""Control requests about adapters (LoRA), and their reply.

An adapter is identified by its content: `uid` is the first 32 hexadecimal digits of a SHA-256 over
the bytes of adapter_config.json and adapter_model.safetensors. Only the front knows names.
"""

from __future__ import annotations

from weft.messages.calls import ControlRequest, SuccessReply


class AdapterReply(SuccessReply):
    status: int = 200  # HTTP status
    evicted: list[str] = []  # uids of adapters that were evicted to make room
    num_requests: int = 0  # open requests whose end the unloading waited for


class LoadLoraAdapter(ControlRequest[AdapterReply]):
    """Load an adapter, if it is not loaded yet. Answered when requests may use it."""

    lora_path: str  # its folder, below --weights-root or one of --lora-paths
    uid: str
    lora_name: str = ""  # for log and error messages
    pinned: bool = False  # it keeps a slot while it is loaded, and is never evicted


class UnloadLoraAdapter(ControlRequest[AdapterReply]):
    """Unload an adapter. New requests for it are refused at once. Answered when its open requests
    have ended."""

    uid: str
