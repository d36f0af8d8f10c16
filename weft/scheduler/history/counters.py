"""What has happened since the start, in numbers that only grow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    num_steps: int = 0
    num_prefill_steps: int = 0
    num_requests: int = 0  # that arrived; also the number of the next one
    num_duplicates: int = 0  # messages with the number of an open request
    num_unknown: int = 0  # messages that nobody handles
    num_unreadable: int = 0  # messages that could not be read
    num_failed: int = 0  # messages whose handling raised, and what else failed between two steps
    num_queue_full: int = 0  # requests refused because the queue was full
    num_aborted: int = 0
    num_prompt_tokens: int = 0  # of admitted requests
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_prefilled_tokens: int = 0  # computed, retracted requests counted again
    num_generated_tokens: int = 0
    num_retractions: int = 0
    num_faults: int = 0  # found in the books of memory, or raised by the scheduler

    def totals(self) -> dict[str, int]:
        """By the names that they have in `Stats`."""
        return {
            "total_steps": self.num_steps,
            "total_prefill_steps": self.num_prefill_steps,
            "total_prompt_tokens": self.num_prompt_tokens,
            "total_cached_tokens": self.num_cached_tokens,
            "total_prefilled_tokens": self.num_prefilled_tokens,
            "total_generated_tokens": self.num_generated_tokens,
            "total_retractions": self.num_retractions,
            "total_requests": self.num_requests,
            "total_aborted": self.num_aborted,
            "total_faults": self.num_faults,
            "total_queue_full": self.num_queue_full,
            "total_dropped_messages": self.num_unreadable,
            "total_unknown_messages": self.num_unknown,
            "total_failed_messages": self.num_failed,
            "total_duplicate_requests": self.num_duplicates,
        }
